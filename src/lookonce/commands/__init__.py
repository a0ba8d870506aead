"""The commands of the command line: their arguments and what they print. The phases do the work.

options    arguments and options that commands share, and printing
manual     the page of the documentation for each command
sample     lookonce sample
init       lookonce init
check      lookonce check
data       lookonce data prepare, convert, audit, tar
cache      lookonce cache plan, build, status, verify, repair, show, gc, stage
train      lookonce train
evaluate   lookonce eval
compare    lookonce compare
export     lookonce export
report     lookonce report
study      lookonce study plan, run, status, report, jobs
predict    lookonce predict
ask        lookonce ask
adapter    lookonce adapter merge, check, push
fetch      lookonce fetch
status     lookonce status
bench      lookonce bench step, cache, read
selftest   lookonce selftest
"""
