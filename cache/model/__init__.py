"""What features are computed from: the model folder with its vision tower, and the tower's input for an image.

model_folder  the model folder: its configuration, its tensors, and which of them it lacks
pixels        image file to 8-bit pixels of the size that the tower takes, and these to patches
tower         the vision tower alone, loaded from the model folder, and made fast on a GPU
"""
