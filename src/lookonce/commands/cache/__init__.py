"""The commands `lookonce cache ...`.

group        the group
build        lookonce cache plan, build, status
maintenance  lookonce cache verify, repair, show, gc, stage
"""
