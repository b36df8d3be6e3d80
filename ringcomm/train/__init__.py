"""The reference trainer: ``python -m ringcomm.train``, alone or under torchrun or mpirun.

It is a complete, small data-parallel training program: real models (ResNet, ViT, GPT), real
data, checkpoints, a log, and a report that splits each step into computation and communication.
It shows the use of ringcomm from PyTorch, and scaling claims are measured with it.

Files, top to bottom; a file imports only files below it:

    __main__                            errors become one sentence and an exit code
    run                                 a run from set-up to report
    engine                              a training step, an evaluation
    methods                             exchange between ranks: gradients, momentum, weights
    distributed                         the process group, and control messages between ranks
    progress, final_report, checkpoint  display and log, final report, files on disk
    sampling, optim, models             order of the samples, optimizers, networks
    resnet, transformer
    data                                sources of samples
    launcher, command_line              the environment, the command line

For users is the command line; the modules are the trainer's own.

Invariants. It trains on the CPU. N ranks with a global batch B see exactly the batches that one
process with batch B sees, so their weights agree up to the order of summation.
"""
