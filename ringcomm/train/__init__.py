"""The reference trainer: ``python -m ringcomm.train``, alone or under torchrun or mpirun.

What it is. A complete, small data-parallel training program: real models (ResNet, ViT, GPT), real
data, checkpoints, a log, and a report that splits each step into computation and communication.
It shows how ringcomm is used from PyTorch and is what scaling claims are measured with.

How it is laid out, top to bottom; a file imports only what stands below it:

    __main__                      errors become one sentence and an exit code
    loop                          a run from set-up to report
    engine                        a training step, an evaluation
    methods                       how ranks learn from each other
    distributed                   the process group, and what else ranks tell each other
    progress, report, checkpoint  what is shown, told at the end, kept on disk
    sampling, optim, models       which samples, which rule, which network
    resnet, vit, gpt, transformer
    folder, data                  where samples come from
    launcher, options             the environment, the command line

Invariants. It trains on the CPU. N ranks with a global batch B see exactly the batches that one
process with batch B sees, so their weights agree up to the order of summation.
"""
