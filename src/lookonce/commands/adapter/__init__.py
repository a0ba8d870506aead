"""The commands `lookonce adapter ...`.

group    the group
"""
