"""The families of models that lookonce trains, one description each. Nothing else asks for a model's name.

kernels     kernels of linear attention from other packages, where they may be used
family      the description: all that differs between families
lookup      the family of a configuration, a model folder or a tower
qwen3_vl    Qwen3-VL and its mixture of experts
qwen2_5_vl  Qwen2.5-VL and Qwen2-VL
qwen3_5     Qwen3.5 and its mixture of experts

Imports run one way: lookup -> the families -> family.
"""
