# cython: language_level=3, boundscheck=False, wraparound=False
"""Python bindings of `connections.hpp`. They release the GIL to wait and to write."""

from hashlib import shake_128

cimport cython
cimport numpy as np
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free
from libcpp cimport bool as cpp_bool
from libcpp.string cimport string
from posix.unistd cimport getpid

np.import_array()

cdef extern from "connections.hpp" namespace "sparsecomm" nogil:
    enum: DATA_ "sparsecomm::DATA"
    enum: MORE_ "sparsecomm::MORE"
    enum: GOODBYE_ "sparsecomm::GOODBYE"
    enum: SENT_ "sparsecomm::SENT"
    enum: DISCONNECTED_ "sparsecomm::DISCONNECTED"
    enum: UNREADABLE_ "sparsecomm::UNREADABLE"
    const size_t TICKETS_BYTES_ "sparsecomm::TICKETS_BYTES"

    cdef cppclass CMessage "sparsecomm::Message":
        int64_t number
        char *memory
        uint64_t total

    cdef cppclass CCompletion "sparsecomm::Completion":
        int kind, rank
        CMessage message
        uint64_t request
        string text

    cdef cppclass CTraffic "sparsecomm::Traffic":
        uint64_t sent, received, retransmits
        double seconds, round_trip
        int connections

    enum CSent "sparsecomm::Sent":
        DONE "sparsecomm::Sent::DONE"
        IN_FLIGHT "sparsecomm::Sent::IN_FLIGHT"
        BROKEN "sparsecomm::Sent::BROKEN"

    cdef cppclass CConnections "sparsecomm::Connections":
        CConnections(int rank, int size, size_t limit, int streams) except +
        int listen(const string &address) except +
        void set_peer(int rank, const string &address, int port, const string &tickets) except +
        void start(double seconds) except +
        cpp_bool join(double seconds)
        string failure(int rank)
        cpp_bool is_connected(int rank)
        CSent send(int to, int32_t kind, int64_t number, const char *data, size_t nbytes, uint64_t request) except +
        cpp_bool next(double seconds, CCompletion *to)
        size_t pending()
        CTraffic traffic(int rank)
        int thread_id()
        void close(double seconds)

DATA, MORE, GOODBYE, SENT = DATA_, MORE_, GOODBYE_, SENT_
DISCONNECTED, UNREADABLE = DISCONNECTED_, UNREADABLE_
TOKEN_BYTES = 16


@cython.final
@cython.freelist(16)
@cython.no_gc
cdef class Received:
    """Owns the memory of a received message for the array that views it."""

    cdef char *memory

    def __dealloc__(self):
        free(self.memory)


cdef class Connections:
    """The connections of a rank to all others. `connections.hpp` explains the methods."""

    cdef CConnections *own
    cdef int rank, process
    cdef bytes token
    cdef uint64_t last_request
    cdef dict in_flight  # request number -> (data of the message, request object); keeps the data alive until `SENT`

    def __cinit__(self, int rank, int size, size_t limit, int streams):
        self.rank, self.process = rank, getpid()
        self.token = b""
        self.in_flight = {}
        self.own = new CConnections(rank, size, limit, streams)

    def __dealloc__(self):
        if self.own != NULL and self.process == getpid():
            with nogil:
                del self.own

    def listen(self, str address, bytes token):
        """Listen on an address and return the port. ``token``: random bytes that only the ranks of the group know."""
        if len(token) != TOKEN_BYTES:
            raise ValueError(f"token has {len(token)} bytes; expected {TOKEN_BYTES}")
        self.token = token
        return self.own.listen(address.encode())

    def set_peer(self, int rank, str address, int port, bytes token):
        both = self.token + token if self.rank < rank else token + self.token
        self.own.set_peer(rank, address.encode(), port, shake_128(both).digest(TICKETS_BYTES_))

    def start(self, double seconds):
        self.own.start(seconds)

    def join(self, double seconds):
        cdef cpp_bool connected
        with nogil:
            connected = self.own.join(seconds)
        return connected

    def is_connected(self, int rank):
        return self.own.is_connected(rank)

    def failure(self, int rank):
        return self.own.failure(rank).decode(errors="replace")

    @property
    def thread_id(self):
        return self.own.thread_id()

    def send(self, int to, int64_t number, np.ndarray data, request, int kind=DATA_):
        """Start sending ``data``, contiguous bytes of call ``number``. With `MORE`, the next message continues it.

        Returns:
            True if the memory of ``data`` may be reused. False if not: the completion `SENT` with ``request`` follows.
            None if the connection is lost: the completion `DISCONNECTED` or `UNREADABLE` follows soon.
        """
        cdef CSent sent
        cdef char *memory = np.PyArray_BYTES(data)
        cdef size_t nbytes = np.PyArray_NBYTES(data)
        cdef uint64_t this = self.last_request + 1
        self.last_request = this
        self.in_flight[this] = data, request
        sent = BROKEN
        try:
            with nogil:
                sent = self.own.send(to, kind, number, memory, nbytes, this)
        finally:
            if sent != IN_FLIGHT:
                del self.in_flight[this]
        if sent == IN_FLIGHT:
            return False
        return True if sent == DONE else None

    def send_control(self, int to, int kind, int64_t number, bytes text):
        cdef const char *memory = text
        cdef size_t nbytes = len(text)
        with nogil:
            self.own.send(to, kind, number, memory, nbytes, 0)

    def next(self, double seconds):
        """Return the next completion, or None if there is none within ``seconds`` or a signal arrives.

        A completion is a tuple of its kind, the peer's rank, the call number, and its content: the data of a message,
        the request of a message whose memory may be reused (`SENT`), or a text (`DISCONNECTED`, `UNREADABLE`).
        """
        cdef CCompletion completion
        cdef cpp_bool found
        cdef Received keeper
        cdef np.npy_intp nbytes
        if seconds > 0:
            with nogil:
                found = self.own.next(seconds, &completion)
        else:
            found = self.own.next(0.0, &completion)
        if not found:
            return None
        if completion.kind == SENT_:
            return SENT_, completion.rank, 0, self.in_flight.pop(completion.request)[1]
        if completion.kind == DISCONNECTED_ or completion.kind == UNREADABLE_:
            return completion.kind, completion.rank, 0, completion.text.decode(errors="replace")
        keeper = Received.__new__(Received)
        keeper.memory = completion.message.memory
        nbytes = completion.message.total
        data = np.PyArray_SimpleNewFromData(1, &nbytes, np.NPY_UINT8, keeper.memory)
        np.set_array_base(data, keeper)
        return completion.kind, completion.rank, completion.message.number, data

    @property
    def pending(self):
        return self.own.pending()

    def traffic(self, int rank):
        """Return the traffic with a rank as a tuple: the fields of `PeerTraffic` in order, without ``rank``."""
        cdef CTraffic found = self.own.traffic(rank)
        return found.sent, found.received, found.seconds, found.round_trip, found.retransmits, found.connections

    def close(self, double seconds):
        with nogil:
            self.own.close(seconds)
        self.in_flight.clear()
