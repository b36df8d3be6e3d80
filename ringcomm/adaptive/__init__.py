"""Choice of a codec from the measured times of steps.

    law               forecast of a step's time by another codec, and the decision to change
    codec_agreement   exchange of measurements and of the decision between ranks

All of it is arithmetic: no clock, no thread, no socket and no tensor library. ringcomm.torch uses
it, by Agreement, Law, ladder and the records that these take; nothing is for users.
"""
