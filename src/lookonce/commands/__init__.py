"""The commands of the command line: their arguments and what they print. The phases do the work.

options    arguments and options that commands share, and printing
prepare    lookonce sample, init, check, fetch
data       lookonce data prepare, convert, audit
cache      lookonce cache plan, build, verify, repair, show, gc, stage
train      lookonce train, status, selftest, bench
evaluate   lookonce eval, predict, ask, export
compare    lookonce compare, report
study      lookonce study plan, run, status, report, jobs
adapter    lookonce adapter merge, check, push
"""
