/* What most calls of a group have in common, before Python's method is asked: see quick.py.

   Neither torch's headers nor MPI's are used. Tensors are described by DLPack, options read where fields.py has found that torch keeps them or asked
   as Python would, and MPI is a table of addresses: what is compiled serves every torch, and every MPI whose handles are as wide as HANDLE (int in
   MPICH, a pointer in Open MPI).

   Where something is out of the ordinary nothing has been done yet, and the method does all of it, complaints included. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>
#ifdef __linux__
#include <sys/timerfd.h>
#else /* the post has no timer there */
struct itimerspec { struct timespec it_interval, it_value; };
#define timerfd_settime(...) (-1)
#endif

typedef HANDLE handle;

#define OPERATIONS 8
#define REDUCTIONS 16
#define DTYPES 16
#define SIZES 64 /* powers of two */
#define STATUS(name) _Alignas(16) char name[256] /* more than any MPI's has */

static struct {
    int (*all_reduce)(const void *, void *, int, handle, handle, handle);
    int (*reduce)(const void *, void *, int, handle, handle, int, handle);
    int (*reduce_scatter)(const void *, void *, int, handle, handle, handle);
    int (*all_gather)(const void *, int, handle, void *, int, handle, handle);
    int (*all_to_all)(const void *, const int *, const int *, handle, void *, const int *, const int *, handle, handle);
    int (*broadcast)(void *, int, handle, int, handle);
    int (*send)(const void *, int, handle, int, int, handle, handle *);
    int (*receive)(void *, int, handle, int, int, handle, handle *);
    int (*test)(handle *, int *, void *);
    int (*wait)(handle *, void *);
    int (*probe)(int, int, handle, int *, void *);
    int (*exchange)(const void *, int, handle, int, int, void *, int, handle, int, int, handle, void *);
    int (*add)(const void *, void *, int, handle, handle);
    int (*gather)(const void *, int, handle, void *, const int *, const int *, handle, int, handle);
} mpi;
static handle byte_type, self_comm;
static int any_source, any_tag, rounds_tag;
static void *in_place;

/* DLPack's description of a tensor, and the table of functions that torch gives away with its class; both in DLPack's layout. */
typedef struct {
    char *data;
    int32_t device, device_index, dimensions;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    const int64_t *shape, *strides;
    uint64_t offset;
} Description;

static struct {
    uint32_t major, minor;
    void *older, *allocate, *from_object, *to_object;
    int (*describe)(void *object, Description *out);
} *dlpack;

enum { HOST = 1 }; /* DLPack's number of that device */
#define DTYPE(code, bits) ((code) << 8 | (bits))

static PyObject *failure, *looks, *work_type, *tensor_type, *parameter_type; /* MPI's exception, the profiler's variables, torch's classes */
static PyObject *s_async, *s_reduction, *s_root, *s_profiled, *s_follow, *s_wait, *s_completed, *s_empty;

typedef struct {
    handle kind, op;
    int width; /* bytes of one of `kind`; 0 where MPI cannot do it as it is */
    int alike; /* a bit for each operation: its sums are the same by shared memory, and only then a large one may have chosen */
} Way;

/* Where torch's options of one kind keep what is asked of them, in bytes from where they begin; -1 where that is not known. */
typedef struct {
    PyObject *type;
    int later, reduction, root;
} Fields;

typedef struct State State;
typedef struct Operation Operation;
typedef PyObject *(*Quick)(State *, const Operation *, PyObject *const *args, int *begun);

/* A method of the group's class. Who calls it by its name comes here; who takes it out first, as C++ does, gets Python's. */
struct Operation {
    PyObject_HEAD
    vectorcallfunc call;
    Quick quick;
    Py_ssize_t count; /* of arguments */
    int place;        /* in the table of operations */
    PyObject *name, *method;
    Fields fields;
};

/* A group, as its calls need it. */
struct State {
    PyObject_HEAD
    PyObject *lane, *post;                               /* its order; who looks after large messages */
    PyObject **waiting, **current, **number, **together; /* the lane's slots of these names */
    PyObject **thread, **helped, **helps, *under_way;    /* the post's, and what it looks after */
    PyObject *settled, *made; /* which way large collectives have chosen; what makes Python's message of one */
    struct itimerspec after, soon; /* when the post looks: usually, and while it helps */
    int timer;
    long long small, sums;        /* bytes below which a collective has nothing to choose, nor a sum whose bits depend on the way */
    long long scatters, reduces;  /* bytes from which they go by pairs */
    long long most;               /* that MPI counts */
    long long alone;              /* bytes up to which nobody looks after a message */
    handle comm;
    int index, count, *counts, *places;
    int dtypes[DTYPES];
    char plain[OPERATIONS][SIZES]; /* those that have settled on MPI */
    Way ways[REDUCTIONS][DTYPES];
};

/* -- what is asked of tensors and options; 0 where the answer is out of the ordinary -- */

typedef struct {
    char *at;
    int64_t size, rows; /* bytes; of the first dimension, 0 without one */
    int dtype;
} Span;

/* Contiguous, in the host's memory, and no subclass that might mean something else by it. */
static int span_of(State *state, PyObject *tensor, Span *span)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    Description found;
    if ((type != tensor_type && type != parameter_type) || dlpack->describe(tensor, &found) != 0)
        return 0;
    int64_t count = 1;
    for (int n = found.dimensions - 1; n >= 0; n--) {
        if (found.shape[n] != 1 && found.strides[n] != count)
            return 0;
        count *= found.shape[n];
    }
    span->at = found.data + found.offset;
    span->size = count * found.dtype.bits / 8;
    span->rows = found.dimensions ? found.shape[0] : 0;
    span->dtype = DTYPE(found.dtype.code, found.dtype.bits);
    return found.device == HOST && found.dtype.lanes == 1 && found.dtype.bits % 8 == 0 && span->size <= state->most;
}

static PyObject *only(PyObject *list) { return PyList_Check(list) && PyList_GET_SIZE(list) == 1 ? PyList_GET_ITEM(list, 0) : NULL; }

static int none(PyObject *list) { return PyList_Check(list) && PyList_GET_SIZE(list) == 0; }

static int apart(Span a, Span b) { return a.at >= b.at + b.size || b.at >= a.at + a.size; }

/* A whole number from 0 to what an int holds; otherwise -1. */
static int as_int(PyObject *object)
{
    long long value = object != NULL && PyLong_Check(object) ? PyLong_AsLongLong(object) : -1;
    return value >= 0 && value <= INT_MAX ? (int)value : -1;
}

/* What lies behind an object's head is pybind's address of what it holds. Of another kind, or unknown, it is asked as Python would. */
static char *field_of(const Operation *self, PyObject *options, int at)
{
    char *held = (PyObject *)Py_TYPE(options) == self->fields.type && at >= 0 ? *(char **)(options + 1) : NULL;
    return held != NULL ? held + at : NULL;
}

static int at_once(const Operation *self, PyObject *options)
{
    const char *field = field_of(self, options, self->fields.later);
    if (field != NULL)
        return *field == 0;
    PyObject *later = PyObject_GetAttr(options, s_async);
    Py_XDECREF(later);
    return later == Py_False;
}

static int root_of(const Operation *self, PyObject *options)
{
    const char *field = field_of(self, options, self->fields.root);
    int64_t root;
    if (field != NULL) {
        memcpy(&root, field, sizeof root);
        return root >= 0 && root <= INT_MAX ? (int)root : -1;
    }
    PyObject *found = PyObject_GetAttr(options, s_root);
    int value = as_int(found);
    Py_XDECREF(found);
    return value;
}

static Py_hash_t reduction_of(const Operation *self, PyObject *options)
{
    const char *field = field_of(self, options, self->fields.reduction);
    if (field != NULL)
        return *(const uint8_t *)field;
    PyObject *reduction = PyObject_GetAttr(options, s_reduction);
    Py_hash_t kind = reduction != NULL ? PyObject_Hash(reduction) : -1; /* the number of its kind */
    Py_XDECREF(reduction);
    return kind;
}

/* As Near.window: small, or found to be quicker so, which holds from then on. */
static int by_mpi(const Operation *self, State *state, int64_t size)
{
    if (size < state->small)
        return 1;
    int bits = 0;
    while (size >> bits)
        bits++;
    char *plain = &state->plain[self->place][bits];
    if (!*plain) {
        PyObject *key = Py_BuildValue("Oi", self->name, bits);
        *plain = key != NULL && PyDict_GetItemWithError(state->settled, key) == Py_None;
        Py_XDECREF(key);
    }
    return *plain;
}

static const Way *way_of(const Operation *self, State *state, PyObject *options, Span span, int64_t size)
{
    Py_hash_t kind = reduction_of(self, options);
    for (int n = 0; kind >= 0 && kind < REDUCTIONS && n < DTYPES && state->dtypes[n]; n++)
        if (state->dtypes[n] == span.dtype) {
            const Way *way = &state->ways[kind][n];
            return way->width && (way->alike >> self->place & 1 ? by_mpi(self, state, size) : size < state->sums) ? way : NULL;
        }
    return NULL;
}

/* As Lane.begin: nobody waits, nobody is at it, nobody looks on. No Python runs between asking and saying. */
static int begin(State *state, PyObject *name)
{
    if (Py_SIZE(*state->waiting) != 0 || PyUnicode_GET_LENGTH(*state->current) != 0 || PyDict_GetItemWithError(looks, s_profiled) != Py_False)
        return 0;
    PyObject *next = PyLong_FromLongLong(PyLong_AsLongLong(*state->number) + 1);
    if (next == NULL)
        return 0;
    Py_SETREF(*state->number, next);
    Py_SETREF(*state->current, Py_NewRef(name));
    return 1;
}

static PyObject *raised(int code)
{
    PyObject *error = PyObject_CallFunction(failure, "i", code);
    if (error != NULL)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    return NULL;
}

static PyObject *ended(State *state, int code)
{
    Py_SETREF(*state->current, Py_NewRef(s_empty));
    if (code)
        return raised(code);
    Py_RETURN_NONE;
}

#define WITHOUT_LOCK(call) Py_BEGIN_ALLOW_THREADS code = call; Py_END_ALLOW_THREADS

/* Bytes for the largest of nearly equal parts of so many, and up to where another may begin. */
static size_t room_of(State *state, int64_t size) { return ((size_t)(size / state->count) + 128) & ~(size_t)63; }

static void equal_parts(State *state, int size)
{
    for (int n = 0; n < state->count; n++)
        state->counts[n] = size, state->places[n] = n * size;
}

/* -- collectives. Each returns NULL with `begun` at 0 where the method is to do it. -- */

static PyObject *all_reduce(State *state, const Operation *self, PyObject *const *args, int *begun)
{
    PyObject *tensor = only(args[0]);
    const Way *way;
    Span span;
    int code;
    if (tensor == NULL || !span_of(state, tensor, &span) || !at_once(self, args[1]) || !(way = way_of(self, state, args[1], span, span.size)) ||
        !(*begun = begin(state, self->name)))
        return NULL;
    WITHOUT_LOCK(mpi.all_reduce(in_place, span.at, (int)(span.size / way->width), way->kind, way->op, state->comm))
    return ended(state, code);
}

/* As Calls._scatter_by_pairs: this rank's part of `whole` summed up to `own`, which may be it. Parts lie as the state's counts and places say; one that
   arrives is put into `room`. */
static int scattered_by_pairs(State *state, const Way *way, const char *whole, char *own, char *room)
{
    const int size = state->counts[state->index];
    STATUS(status);
    int code = 0;
    if (own != whole + state->places[state->index])
        memcpy(own, whole + state->places[state->index], (size_t)size);
    for (int step = 1; !code && step < state->count; step++) {
        const int to = (state->index + state->count - step) % state->count, source = (state->index + step) % state->count;
        code = mpi.exchange(whole + state->places[to], state->counts[to], byte_type, to, rounds_tag, room, size, byte_type, source, rounds_tag,
                            state->comm, status);
        code = code ? code : mpi.add(room, own, size / way->width, way->kind, way->op);
    }
    return code;
}

/* As Calls._reduce_by_pairs, with parts as shared.lengths has them. There is room for two. */
static int reduced_by_pairs(State *state, const Way *way, Span span, int root, char *room)
{
    const int width = (span.dtype & 255) / 8, numbers = (int)(span.size / width), least = numbers / state->count, more = numbers % state->count;
    for (int n = 0, place = 0; n < state->count; place += state->counts[n++])
        state->counts[n] = (least + (n < more)) * width, state->places[n] = place;
    const int here = root == state->index, size = state->counts[state->index];
    char *own = here ? span.at + state->places[root] : room + room_of(state, span.size);
    int code = scattered_by_pairs(state, way, span.at, own, room);
    return code ? code : mpi.gather(here ? in_place : own, size, byte_type, span.at, state->counts, state->places, byte_type, root, state->comm);
}

static PyObject *reduce(State *state, const Operation *self, PyObject *const *args, int *begun)
{
    PyObject *tensor = only(args[0]);
    const Way *way;
    Span span;
    char *room = NULL;
    int code = 0, root, pairs;
    if (tensor == NULL || !span_of(state, tensor, &span) || !at_once(self, args[1]) || (root = root_of(self, args[1])) < 0 ||
        !(way = way_of(self, state, args[1], span, span.size)))
        return NULL;
    pairs = span.size >= state->reduces;
    if ((!pairs || (room = malloc(2 * room_of(state, span.size))) != NULL) && (*begun = begin(state, self->name))) {
        const void *from = root == state->index ? in_place : span.at;
        void *to = root == state->index ? span.at : NULL;
        WITHOUT_LOCK(pairs ? reduced_by_pairs(state, way, span, root, room)
                           : mpi.reduce(from, to, (int)(span.size / way->width), way->kind, way->op, root, state->comm))
    }
    free(room);
    return *begun ? ended(state, code) : NULL;
}

static int parts_of(State *state, PyObject *one, PyObject *all, Span *part, Span *whole)
{
    return span_of(state, one, part) && span_of(state, all, whole) && whole->size == part->size * state->count && part->dtype == whole->dtype &&
           apart(*part, *whole);
}

static PyObject *reduce_scatter(State *state, const Operation *self, PyObject *const *args, int *begun)
{
    const Way *way;
    Span part, whole;
    char *room = NULL;
    int code = 0, pairs;
    if (!parts_of(state, args[0], args[1], &part, &whole) || !at_once(self, args[2]) || !(way = way_of(self, state, args[2], part, whole.size)))
        return NULL;
    pairs = whole.size >= state->scatters;
    if ((!pairs || (room = malloc(room_of(state, whole.size))) != NULL) && (*begun = begin(state, self->name))) {
        equal_parts(state, (int)part.size);
        WITHOUT_LOCK(pairs ? scattered_by_pairs(state, way, whole.at, part.at, room)
                           : mpi.reduce_scatter(whole.at, part.at, (int)(part.size / way->width), way->kind, way->op, state->comm))
    }
    free(room);
    return *begun ? ended(state, code) : NULL;
}

static PyObject *all_gather(State *state, const Operation *self, PyObject *const *args, int *begun)
{
    Span part, whole;
    int code;
    if (!parts_of(state, args[1], args[0], &part, &whole) || !by_mpi(self, state, whole.size) || !at_once(self, args[2]) ||
        !(*begun = begin(state, self->name)))
        return NULL;
    WITHOUT_LOCK(mpi.all_gather(part.at, (int)part.size, byte_type, whole.at, (int)part.size, byte_type, state->comm))
    return ended(state, code);
}

/* Rows in equal numbers; not MPI_Alltoall, since other ranks may have told their splits. */
static PyObject *all_to_all(State *state, const Operation *self, PyObject *const *args, int *begun)
{
    Span to, from;
    int code;
    if (!none(args[2]) || !none(args[3]) || !span_of(state, args[0], &to) || !span_of(state, args[1], &from) || to.size != from.size ||
        to.rows != from.rows || to.dtype != from.dtype || to.rows < 1 || to.rows % state->count || !at_once(self, args[4]) ||
        !(*begun = begin(state, self->name)))
        return NULL;
    equal_parts(state, (int)(from.size / state->count));
    WITHOUT_LOCK(mpi.all_to_all(from.at, state->counts, state->places, byte_type, to.at, state->counts, state->places, byte_type, state->comm))
    return ended(state, code);
}

static PyObject *broadcast(State *state, const Operation *self, PyObject *const *args, int *begun)
{
    PyObject *tensor = only(args[0]);
    Span span;
    int code, root;
    if (tensor == NULL || !span_of(state, tensor, &span) || !by_mpi(self, state, span.size) || !at_once(self, args[1]) ||
        (root = root_of(self, args[1])) < 0 || !(*begun = begin(state, self->name)))
        return NULL;
    WITHOUT_LOCK(mpi.broadcast(span.at, (int)span.size, byte_type, root, state->comm))
    return ended(state, code);
}

/* -- messages: a request that can be waited for. Whatever else torch's Work can do, Python's message does, made when it is asked for. -- */

typedef struct {
    PyObject_HEAD
    State *state;
    PyObject *tensor, *real;
    handle request;
    int source, code; /* who sent it; what MPI said at its end */
    char done;
    char inside; /* a thread waits for it in MPI, or makes the other of it */
} Message;

static Message *over; /* every small message that MPI has taken at once */

static int look(Message *self)
{
    STATUS(status);
    int found = 0;
    if (!self->done && !self->inside && self->real == NULL)
        self->code = mpi.test(&self->request, &found, status);
    self->done |= found || self->code;
    return self->done;
}

static PyObject *real_of(Message *self)
{
    if (self->real == NULL) {
        unsigned long long request = (unsigned long long)(intptr_t)self->request;
        PySet_Discard(self->state->under_way, (PyObject *)self); /* the post is given the other */
        self->inside = 1;
        self->real = PyObject_CallFunction(self->state->made, "KOiOi", request, self->tensor, self->source, self->done ? Py_True : Py_False,
                                           self->code);
        self->inside = 0;
    }
    return self->real;
}

/* Until no other thread is inside. */
static void settle(Message *self)
{
    const struct timespec moment = {0, 50000};
    while (self->inside) {
        Py_BEGIN_ALLOW_THREADS nanosleep(&moment, NULL);
        Py_END_ALLOW_THREADS
    }
}

static PyObject *message_wait(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    Message *self = (Message *)object;
    settle(self);
    if (!self->done && (count || names != NULL || self->real != NULL)) { /* with a timeout, or by the other's rules */
        PyObject *real = real_of(self), *wait = real != NULL ? PyObject_GetAttr(real, s_wait) : NULL;
        PyObject *result = wait != NULL ? PyObject_Vectorcall(wait, args, (size_t)count, names) : NULL;
        Py_XDECREF(wait);
        return result;
    }
    if (!self->done) /* as Post.leave */
        PySet_Discard(self->state->under_way, object);
    if (!look(self)) {
        STATUS(status);
        int code;
        Py_SETREF(*self->state->helped, Py_NewRef(Py_True));
        self->inside = 1;
        WITHOUT_LOCK(mpi.wait(&self->request, status))
        self->inside = 0;
        self->done = 1;
        self->code = code;
        Py_SETREF(*self->state->helped, Py_NewRef(Py_False));
    }
    if (self->code)
        return raised(self->code);
    Py_RETURN_TRUE;
}

static PyObject *message_look(PyObject *object, PyObject *Py_UNUSED(nothing))
{
    return PyBool_FromLong(look((Message *)object));
}

static PyObject *message_completed(PyObject *object, PyObject *Py_UNUSED(nothing))
{
    Message *self = (Message *)object;
    return self->real == NULL || self->done ? PyBool_FromLong(look(self)) : PyObject_CallMethodNoArgs(self->real, s_completed);
}

static PyObject *message_class(PyObject *Py_UNUSED(object), void *Py_UNUSED(nothing)) { return Py_NewRef(work_type); }

static PyObject *message_get(PyObject *object, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(object, name);
    if (found != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return found;
    PyErr_Clear();
    settle((Message *)object);
    PyObject *real = real_of((Message *)object);
    return real != NULL ? PyObject_GetAttr(real, name) : NULL;
}

static int is_over(PyObject *real)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_GetAttrString(real, "done");
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
    return done == Py_True;
}

static void message_delete(PyObject *object)
{
    Message *self = (Message *)object;
    if (self->done || (self->real != NULL && is_over(self->real)))
        Py_XDECREF(self->tensor); /* otherwise MPI is still at it, and nobody will know when that ends: it is kept for ever */
    Py_XDECREF(self->real);
    Py_XDECREF(self->state);
    PyObject_Free(self);
}

static PyMethodDef message_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))message_wait, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"is_completed", message_completed, METH_NOARGS, NULL},
    {"look", message_look, METH_NOARGS, NULL},
    {0}};
static PyMemberDef message_members[] = {{"done", T_BOOL, offsetof(Message, done), READONLY, NULL}, {0}};
static PyGetSetDef message_properties[] = {{"__class__", message_class, NULL, NULL, NULL}, {0}}; /* for isinstance */

static PyTypeObject MessageType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "meshwright.Message",
    .tp_basicsize = sizeof(Message),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = message_delete,
    .tp_getattro = message_get,
    .tp_methods = message_methods,
    .tp_members = message_members,
    .tp_getset = message_properties,
};

static Message *message_new(State *state, PyObject *tensor, handle request, int source)
{
    Message *made = PyObject_New(Message, &MessageType);
    if (made != NULL) {
        made->state = (State *)Py_XNewRef(state);
        made->tensor = Py_XNewRef(tensor);
        made->real = NULL;
        made->request = request;
        made->source = source;
        made->code = made->done = made->inside = 0;
    }
    return made;
}

/* What a send and a receive have in common: one tensor, a rank of the group, a tag, and nobody who collects them. */
static int message_of(State *state, PyObject *const *args, Span *span, int *peer, int *tag)
{
    PyObject *tensor = only(args[0]);
    return tensor != NULL && *state->together == Py_None && (*peer = as_int(args[1])) >= 0 && (*tag = as_int(args[2])) >= 0 &&
           span_of(state, tensor, span);
}

static long long nanoseconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* After a nap: MPI moves what it can, and is asked again as long as that is something. It does not say, but copying takes this thread more time than
   looking, of which the quickest look so far tells how long that takes. The first one after a nap finds nothing in the caches, and counts only if it is
   very long. Who is at the other end needs some time to make room for the next piece. True if there was something, twice: once may be an interrupt. */
static PyObject *stir(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { LOOKS = 4 }; /* at least */
    enum { MORE = 1000, VERY_LONG = 15000, PATIENCE = 50000, ENOUGH = 1000000 }; /* nanoseconds */
    static long long least = VERY_LONG;
    PyObject *under_way;
    double nap;
    int code = 0, found, moved = 0;
    STATUS(status);
    if (!PyArg_ParseTuple(args, "O!d", &PySet_Type, &under_way, &nap))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    const struct timespec pause = {(time_t)nap, (long)((nap - (double)(time_t)nap) * 1e9)};
    nanosleep(&pause, NULL);
    long long now = nanoseconds(CLOCK_THREAD_CPUTIME_ID), last = now;
    const long long end = now + ENOUGH; /* by then somebody should see whether messages are over, or the job is */
    for (int look = 0; !code && now < end && PySet_GET_SIZE(under_way) && (look < LOOKS || (moved && now - last < PATIENCE)); look++) {
        const long long begun = now;
        code = mpi.probe(any_source, any_tag, self_comm, &found, status);
        now = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
        const long long took = now - begun;
        least = took < least ? took : least;
        if (took > (look == 0 ? VERY_LONG : 2 * least + MORE)) {
            moved++;
            last = now;
        }
    }
    Py_END_ALLOW_THREADS
    return code ? raised(code) : PyBool_FromLong(moved > 1);
}

/* The post's timer, set anew when half of the time is over: that costs as much as a small message. */
static int put_off(State *state)
{
    static long long due; /* when it goes off, as it was set last: sooner or later than would be right now if helping has begun or ended since */
    const struct itimerspec *when = *state->helps == Py_True ? &state->soon : &state->after;
    const long long now = nanoseconds(CLOCK_MONOTONIC), left = due - now, whole = when->it_value.tv_nsec;
    if (left > whole / 2 && left <= whole)
        return 1;
    due = now + whole;
    return timerfd_settime(state->timer, 0, when, NULL) == 0;
}

/* As Post.follow, which is asked itself where there is more to do than setting its timer. */
static int follow(State *state, PyObject *message)
{
    if (*state->thread != Py_None && state->timer >= 0)
        return PySet_Add(state->under_way, message) == 0 && (PySet_GET_SIZE(state->under_way) > 1 || put_off(state));
    PyObject *done = PyObject_CallMethodOneArg(state->post, s_follow, message);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *noted(State *state, PyObject *tensor, handle request, int source, int64_t size)
{
    Message *made = message_new(state, tensor, request, source);
    if (made != NULL && size > state->alone && !follow(state, (PyObject *)made))
        Py_CLEAR(made);
    return (PyObject *)made;
}

static PyObject *send_message(State *state, const Operation *Py_UNUSED(self), PyObject *const *args, int *begun)
{
    Span span;
    handle request;
    STATUS(status);
    int code, peer, tag, taken = 0;
    if (!(*begun = message_of(state, args, &span, &peer, &tag)))
        return NULL;
    code = mpi.send(span.at, (int)span.size, byte_type, peer, tag, state->comm, &request);
    if (!code && span.size <= state->alone) /* most small ones are over before they are waited for */
        code = mpi.test(&request, &taken, status);
    if (code)
        return raised(code);
    return taken ? Py_NewRef((PyObject *)over) : noted(state, only(args[0]), request, state->index, span.size);
}

static PyObject *receive_message(State *state, const Operation *Py_UNUSED(self), PyObject *const *args, int *begun)
{
    Span span;
    handle request;
    int code, peer, tag;
    if (!(*begun = message_of(state, args, &span, &peer, &tag)))
        return NULL;
    code = mpi.receive(span.at, (int)span.size, byte_type, peer, tag, state->comm, &request);
    return code ? raised(code) : noted(state, only(args[0]), request, peer, span.size);
}

/* -- what Python makes a group of -- */

static PyObject **slot_of(PyObject *object, const char *name)
{
    PyObject *member = PyObject_GetAttrString((PyObject *)Py_TYPE(object), name), **found = NULL;
    if (member != NULL && Py_TYPE(member) == &PyMemberDescr_Type)
        found = (PyObject **)((char *)object + ((PyMemberDescrObject *)member)->d_member->offset);
    else if (member != NULL)
        PyErr_Format(PyExc_TypeError, "%s is no slot", name);
    Py_XDECREF(member);
    return found;
}

static PyObject *state_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named))
{
    PyObject *lane, *settled, *post, *under_way, *made, *ways;
    unsigned long long comm, kind, op;
    int reduction, code, bits, width, alike;
    State *self = (State *)type->tp_alloc(type, 0);
    if (self == NULL || !PyArg_ParseTuple(args, "OO!OO!illOLLLLLLKiiO!", &lane, &PyDict_Type, &settled, &post, &PySet_Type, &under_way, &self->timer,
                                          &self->after.it_value.tv_nsec, &self->soon.it_value.tv_nsec, &made, &self->small, &self->sums,
                                          &self->scatters, &self->reduces, &self->most, &self->alone, &comm, &self->index, &self->count,
                                          &PyList_Type, &ways))
        goto failed;
    const struct {
        PyObject ***at, *object;
        const char *name;
    } slots[] = {{&self->waiting, lane, "_waiting"}, {&self->current, lane, "current"}, {&self->number, lane, "number"},
                 {&self->together, lane, "together"}, {&self->thread, post, "_thread"}, {&self->helped, post, "helped"},
                 {&self->helps, post, "helps"}};
    for (size_t n = 0; n < sizeof slots / sizeof *slots; n++)
        if ((*slots[n].at = slot_of(slots[n].object, slots[n].name)) == NULL)
            goto failed;
    self->lane = Py_NewRef(lane);
    self->post = Py_NewRef(post);
    self->under_way = Py_NewRef(under_way);
    self->settled = Py_NewRef(settled);
    self->made = Py_NewRef(made);
    self->comm = (handle)(intptr_t)comm;
    self->counts = PyMem_Calloc((size_t)self->count, 2 * sizeof(int));
    self->places = self->counts + self->count;
    if (self->counts == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(ways); n++) {
        int slot = 0;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(ways, n), "i(ii)KKii", &reduction, &code, &bits, &kind, &op, &width, &alike))
            goto failed;
        while (slot < DTYPES && self->dtypes[slot] && self->dtypes[slot] != DTYPE(code, bits))
            slot++;
        if (slot < DTYPES && reduction >= 0 && reduction < REDUCTIONS) {
            self->dtypes[slot] = DTYPE(code, bits);
            self->ways[reduction][slot] = (Way){(handle)(intptr_t)kind, (handle)(intptr_t)op, width, alike};
        }
    }
    return (PyObject *)self;
failed:
    Py_XDECREF(self);
    return NULL;
}

/* For the methods, which have begun: a sum by pairs of parts of any sizes. */
static PyObject *state_scatter(PyObject *object, PyObject *args)
{
    State *state = (State *)object;
    unsigned long long whole, own, kind, op;
    int code = 0, place = 0;
    Way way;
    PyObject *sizes;
    if (!PyArg_ParseTuple(args, "KKO!KKi", &whole, &own, &PyList_Type, &sizes, &kind, &op, &way.width))
        return NULL;
    if (PyList_GET_SIZE(sizes) != state->count || way.width < 1)
        return PyErr_Format(PyExc_ValueError, "not %d sizes, or nothing in them", state->count);
    for (int n = 0; n < state->count; place += state->counts[n++])
        state->counts[n] = as_int(PyList_GET_ITEM(sizes, n)), state->places[n] = place;
    char *room = malloc((size_t)state->counts[state->index] + 1);
    if (room == NULL)
        return PyErr_NoMemory();
    way.kind = (handle)(intptr_t)kind, way.op = (handle)(intptr_t)op;
    WITHOUT_LOCK(scattered_by_pairs(state, &way, (const char *)(intptr_t)whole, (char *)(intptr_t)own, room))
    free(room);
    if (code)
        return raised(code);
    Py_RETURN_NONE;
}

static PyMethodDef state_methods[] = {{"scatter", state_scatter, METH_VARARGS, NULL}, {0}};

static void state_delete(PyObject *object)
{
    State *self = (State *)object;
    Py_XDECREF(self->lane);
    Py_XDECREF(self->post);
    Py_XDECREF(self->under_way);
    Py_XDECREF(self->settled);
    Py_XDECREF(self->made);
    PyMem_Free(self->counts);
    Py_TYPE(self)->tp_free(object);
}

static PyTypeObject StateType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "meshwright.State",
    .tp_basicsize = sizeof(State),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = state_new,
    .tp_dealloc = state_delete,
    .tp_methods = state_methods,
};

/* -- operations -- */

static const struct {
    const char *name;
    Py_ssize_t count;
    Quick quick;
} operations[OPERATIONS] = {{"all_reduce", 2, all_reduce}, {"reduce", 2, reduce}, {"reduce_scatter", 3, reduce_scatter}, {"all_gather", 3, all_gather},
                  {"all_to_all", 5, all_to_all}, {"broadcast", 2, broadcast}, {"send", 3, send_message}, {"receive", 3, receive_message}};

/* What a group keeps in its slot; that is in the same place in all of a class. */
static PyObject *state_of(PyObject *group)
{
    static PyTypeObject *type; /* the one seen last */
    static ptrdiff_t at;
    if (Py_TYPE(group) != type) {
        PyObject **slot = slot_of(group, "_quick");
        if (slot == NULL)
            return NULL;
        type = (PyTypeObject *)Py_NewRef(Py_TYPE(group)); /* for ever: another one might come to lie there */
        at = (char *)slot - (char *)group;
    }
    return Py_XNewRef(*(PyObject **)((char *)group + at));
}

static PyObject *operation_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Operation *self = (Operation *)object;
    if (names == NULL && PyVectorcall_NARGS(flags) == self->count + 1) {
        PyObject *state = state_of(args[0]), *result = NULL;
        int begun = 0;
        if (state != NULL && Py_TYPE(state) == &StateType)
            result = self->quick((State *)state, self, args + 1, &begun);
        Py_XDECREF(state);
        if (begun)
            return result;
        PyErr_Clear(); /* the method will find it out, and say it better */
    }
    return PyObject_Vectorcall(self->method, args, flags, names);
}

static PyObject *operation_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(type))
{
    return instance == NULL ? Py_NewRef(self) : PyMethod_New(((Operation *)self)->method, instance);
}

static PyObject *operation_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named))
{
    PyObject *name, *method;
    Fields fields;
    if (!PyArg_ParseTuple(args, "UOOiii", &name, &method, &fields.type, &fields.later, &fields.reduction, &fields.root))
        return NULL;
    for (int n = 0; n < OPERATIONS; n++)
        if (PyUnicode_CompareWithASCIIString(name, operations[n].name) == 0) {
            Operation *self = (Operation *)type->tp_alloc(type, 0);
            if (self == NULL)
                return NULL;
            self->call = operation_call;
            self->quick = operations[n].quick;
            self->count = operations[n].count;
            self->place = n;
            self->name = Py_NewRef(name);
            self->method = Py_NewRef(method);
            self->fields = fields;
            Py_INCREF(fields.type);
            return (PyObject *)self;
        }
    return PyErr_Format(PyExc_ValueError, "there is no quick %U", name);
}

static void operation_delete(PyObject *object)
{
    Py_DECREF(((Operation *)object)->name);
    Py_DECREF(((Operation *)object)->method);
    Py_DECREF(((Operation *)object)->fields.type);
    Py_TYPE(object)->tp_free(object);
}

static PyMemberDef operation_members[] = {{"__wrapped__", T_OBJECT, offsetof(Operation, method), READONLY, NULL}, {0}};

static PyTypeObject OperationType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "meshwright.Operation",
    .tp_basicsize = sizeof(Operation),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = operation_new,
    .tp_dealloc = operation_delete,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Operation, call),
    .tp_descr_get = operation_get,
    .tp_members = operation_members,
};

/* -- the module -- */

static PyObject *bind(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *addresses, *capsule, *done;
    unsigned long long byte, in, self;
    void **table = (void **)&mpi;
    const Py_ssize_t count = sizeof mpi / sizeof *table;
    if (!PyArg_ParseTuple(args, "O!KKKiiiOOOOOOO", &PyTuple_Type, &addresses, &byte, &in, &self, &any_source, &any_tag, &rounds_tag, &capsule,
                          &failure, &looks, &work_type, &tensor_type, &parameter_type, &done))
        return NULL;
    PyObject *kept[] = {failure, looks, work_type, tensor_type, parameter_type};
    for (size_t n = 0; n < sizeof kept / sizeof *kept; n++)
        Py_INCREF(kept[n]); /* for ever */
    dlpack = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (dlpack == NULL)
        return NULL;
    if (dlpack->major != 1 || dlpack->describe == NULL || PyTuple_GET_SIZE(addresses) != count)
        return PyErr_Format(PyExc_ValueError, "another DLPack than 1, or not %zd addresses", count);
    for (Py_ssize_t n = 0; n < count; n++)
        table[n] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, n));
    byte_type = (handle)(intptr_t)byte;
    in_place = (void *)(intptr_t)in;
    self_comm = (handle)(intptr_t)self;
    over = message_new(NULL, NULL, byte_type, 0);
    if (over == NULL || PyErr_Occurred())
        return NULL;
    over->done = 1;
    over->real = Py_NewRef(done);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"bind", bind, METH_VARARGS, NULL}, {"stir", stir, METH_VARARGS, NULL}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "quick", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_quick(void)
{
    const struct {
        PyObject **at;
        const char *text;
    } names[] = {{&s_async, "asyncOp"}, {&s_reduction, "reduceOp"}, {&s_root, "rootRank"},
                 {&s_profiled, "_is_profiler_enabled"}, {&s_follow, "follow"}, {&s_wait, "wait"}, {&s_completed, "is_completed"}, {&s_empty, ""}};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++)
        if ((*names[n].at = PyUnicode_InternFromString(names[n].text)) == NULL)
            return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyType_Ready(&MessageType) < 0 || PyModule_AddType(module, &StateType) < 0 || PyModule_AddType(module, &OperationType) < 0)
        return NULL;
    return module;
}
