"""The commands `lookonce data ...`.

group    the group, and the arguments that its commands share
prepare  lookonce data prepare
convert  lookonce data convert
audit    lookonce data audit
clean    lookonce data clean
tar      lookonce data tar
"""
