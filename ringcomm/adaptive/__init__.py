"""The choice of a codec, and of the steps between exchanges, from what steps were measured to take.

    measure    what a window of steps took: compute, backward to hide behind, time on the wire
    forecast   what a step would take by another codec, on the link as it was measured
    law        when to change, and to what: hysteresis, dwell, critical phases

All of it is arithmetic: no clock, no thread, no socket and no tensor library.
"""
