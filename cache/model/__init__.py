"""What makes features: the checkpoint and its tower, and an image file as the tower's input.

model_folder  the model folder, and the tower's tensors in it
pixels       an image file as 8-bit pixels of the tower's size, and those as patches
tower        the tower alone, out of the checkpoint
fast_tower   the same on a GPU, several images of mixed size at once
"""
