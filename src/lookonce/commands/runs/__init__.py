"""Commands that read the answers of finished runs.

compare  lookonce compare
export   lookonce export
report   lookonce report
"""
