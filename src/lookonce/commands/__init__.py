"""What the command line's commands take and print; what they do is in `datasets`, `cache` and `train`.

options    arguments and options that commands share, and how they print
data       lookonce data prepare
records    lookonce data convert
audit      lookonce data audit, pack
cache      lookonce cache plan, build, status
care       lookonce cache verify, repair, show, gc, stage
fetch      lookonce fetch
status     lookonce status
bench      lookonce bench step, cache, read
"""
