"""The self-test: whether packs are exact on this machine, with this GPU and these libraries.

ways          the ways to compute packs, and the settings of a run file that choose each
report        what was compared, how large each difference is and may be
layouts       packs as lengths, and the definition of which token attends to which
attention     attention over packs beside a float64 reference; masks and block lists beside the definition
questions     random questions about random images, in packs and in rows
model         a small Qwen3-VL with random weights and a random adapter
passes        loss and gradients of packs, and of the rows of stock training
model_checks  the small model's packs beside stock rows, in every way
run           the whole self-test
note          results that were noted on this machine
"""
