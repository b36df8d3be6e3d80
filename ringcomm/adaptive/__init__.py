"""The choice of a codec from what steps were measured to take.

    law         what a step would take by another codec, when to change, and to what
    agreement   how the ranks come to one decision

All of it is arithmetic: no clock, no thread, no socket and no tensor library.
"""
