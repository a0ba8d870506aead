"""How sure a score is, and whether two scores differ; numbers only, with numpy.

clusters      which questions belong together because they share an image
intervals     95 % intervals over images
significance  whether two runs differ: sign flips by image, McNemar, Holm
"""
