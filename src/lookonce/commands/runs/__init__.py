"""Commands about several runs, or about the answers of finished ones.

compare  lookonce compare
export   lookonce export
report   lookonce report
study    lookonce study plan, run, status, report
"""
