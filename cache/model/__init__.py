"""What features are computed from: the model folder with its vision tower, and the tower's input for an image.

model_folder  the model folder, and the tensors of the tower in it
tensor_header  the header of a safetensors file
expert_tensors  which tensors of experts a model folder lacks, or holds with other shapes
content_hash  hashes of a model folder, whole or without its tower
pixels        image file to 8-bit pixels of the size that the tower takes, and these to patches
tower         the vision tower alone, loaded from the model folder
fast_tower    the same tower made fast on a GPU, for several images of different sizes at once
"""
