"""Parts that the hook, the optimizers and outer steps share: at least two of these use each part.

account          bytes and times of exchanges
exchange_report  what an account tells
bucket           tensors laid end to end in flat memory
pending          the mean of one tensor on its way
agreement        what must be alike on all ranks before data moves
kept             what a checkpoint keeps of an object
"""
