"""Steps that no signal divides.

Python runs signal handlers between the instructions of its bytecode, so an exception of a handler may come after any
call of Python code. What these functions do between the calls that they make is C, where none can come.
"""

cdef enum:
    ATTEMPTS = 100  # of a step; one that is interrupted so often will not end


def persevere(step):
    """Call ``step(error)`` until it returns, then raise the first of the exceptions that have interrupted it.

    Args:
        step: goes on from where its last call stopped, whatever has stopped it; called with the first exception, or
            None. What fails a hundred times has failed.
    """
    cdef int attempt
    first = None
    for attempt in range(ATTEMPTS):
        try:
            step(first)
            break
        except BaseException as error:
            if first is None:
                first = error
    if first is not None:
        raise first


def run_all(calls, list done, item):
    """Make all calls, each without arguments, and append ``item`` to ``done``, if that is a list.

    Calls of compiled code are not divided from each other, nor the last one from the note of it.
    """
    for call in calls:
        call()
    if done is not None:
        done.append(item)
