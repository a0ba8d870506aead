"""What a trained adapter is used for outside of this project: merged, checked for other programs, uploaded.
"""
