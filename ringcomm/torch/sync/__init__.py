"""Parts that the hook, the optimizers and outer steps share; each at least two of them.

bucket       tensors laid end to end in flat memory
pending      the mean of one tensor on its way
agreement    what must be alike on all ranks before data moves
kept         what a checkpoint keeps of an object
"""
