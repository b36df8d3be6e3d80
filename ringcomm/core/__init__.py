"""The road from Python to the C core and back; nothing outside this package calls the core.

    faces, views           objects of numpy, torch, CuPy and others as memory
    calls, dispatch, work  arguments checked once, a call submitted, a call in flight
    pipe, cuda             tensors on a GPU
    residuals, chunks      error feedback of one tensor; sparse payloads
    opening, counters      a communicator of the core; its counters
    timeline               its collectives as a trace
    native                 the extension itself, its engine, its errors as exceptions
    callback_threads       threads that call back

``Dispatcher`` is the base of Communicator. Other packages use ``Dispatcher.run_collective``,
``run_in_place`` and ``submit_in_place``, and ``faces.view``.
"""
