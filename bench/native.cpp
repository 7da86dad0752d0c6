/* A group's methods with torch's headers: options read by their fields, MPI's call made, and nothing else. No order among calls, nothing put off,
   sums of fp32 only, nothing checked. What no group that torch calls from Python can do in less: see mpi.py, which compiles it. */

#include <mpi.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

MPI_Comm comm;
int own, ranks;

struct Span {
    char *at;
    int size;
    explicit Span(PyObject *tensor)
    {
        const at::Tensor &found = THPVariable_Unpack(tensor);
        at = static_cast<char *>(found.data_ptr());
        size = static_cast<int>(found.nbytes());
    }
    int numbers() const { return size / 4; }
};

Span only(PyObject *list) { return Span(PyList_GET_ITEM(list, 0)); }

template <class Options> const Options &now(PyObject *object)
{
    const auto &options = py::handle(object).cast<const Options &>();
    if (options.asyncOp)
        throw std::runtime_error("not later");
    return options;
}

template <class Options> const Options &sum(PyObject *object)
{
    const auto &options = now<Options>(object);
    if (options.reduceOp != c10d::ReduceOp::SUM)
        throw std::runtime_error("sums only");
    return options;
}

#define LET_GO(call) Py_BEGIN_ALLOW_THREADS call; Py_END_ALLOW_THREADS Py_RETURN_NONE;

PyObject *all_reduce(PyObject *const *args)
{
    sum<c10d::AllreduceOptions>(args[1]);
    Span whole = only(args[0]);
    LET_GO(MPI_Allreduce(MPI_IN_PLACE, whole.at, whole.numbers(), MPI_FLOAT, MPI_SUM, comm))
}

PyObject *reduce(PyObject *const *args)
{
    int root = static_cast<int>(sum<c10d::ReduceOptions>(args[1]).rootRank);
    Span whole = only(args[0]);
    LET_GO(MPI_Reduce(root == own ? MPI_IN_PLACE : whole.at, whole.at, whole.numbers(), MPI_FLOAT, MPI_SUM, root, comm))
}

PyObject *reduce_scatter(PyObject *const *args)
{
    sum<c10d::ReduceScatterOptions>(args[2]);
    Span part(args[0]), whole(args[1]);
    LET_GO(MPI_Reduce_scatter_block(whole.at, part.at, part.numbers(), MPI_FLOAT, MPI_SUM, comm))
}

PyObject *all_gather(PyObject *const *args)
{
    now<c10d::AllgatherOptions>(args[2]);
    Span whole(args[0]), part(args[1]);
    LET_GO(MPI_Allgather(part.at, part.size, MPI_BYTE, whole.at, part.size, MPI_BYTE, comm))
}

PyObject *all_to_all(PyObject *const *args)
{
    now<c10d::AllToAllOptions>(args[4]);
    Span to(args[0]), from(args[1]);
    LET_GO(MPI_Alltoall(from.at, from.size / ranks, MPI_BYTE, to.at, to.size / ranks, MPI_BYTE, comm))
}

PyObject *broadcast(PyObject *const *args)
{
    int root = static_cast<int>(now<c10d::BroadcastOptions>(args[1]).rootRank);
    Span whole = only(args[0]);
    LET_GO(MPI_Bcast(whole.at, whole.size, MPI_BYTE, root, comm))
}

PyObject *barrier(PyObject *const *) { LET_GO(MPI_Barrier(comm)) }

/* A message that can be waited for. */
struct Request {
    PyObject_HEAD
    MPI_Request request;
};

PyObject *request_wait(PyObject *self, PyObject *)
{
    LET_GO(MPI_Wait(&reinterpret_cast<Request *>(self)->request, MPI_STATUS_IGNORE))
}

PyMethodDef request_methods[] = {{"wait", request_wait, METH_NOARGS, nullptr}, {}};
PyTypeObject request_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

Request *made() { return PyObject_New(Request, &request_type); }

int number(PyObject *object) { return static_cast<int>(PyLong_AsLong(object)); }

PyObject *send(PyObject *const *args)
{
    Span whole = only(args[0]);
    Request *message = made();
    MPI_Isend(whole.at, whole.size, MPI_BYTE, number(args[1]), number(args[2]), comm, &message->request);
    return reinterpret_cast<PyObject *>(message);
}

PyObject *receive(PyObject *const *args)
{
    Span whole = only(args[0]);
    Request *message = made();
    MPI_Irecv(whole.at, whole.size, MPI_BYTE, number(args[1]), number(args[2]), comm, &message->request);
    return reinterpret_cast<PyObject *>(message);
}

/* What a class takes for one of its methods. */
struct Method {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *(*does)(PyObject *const *args);
};

PyObject *method_call(PyObject *self, PyObject *const *args, size_t, PyObject *)
{
    try {
        return reinterpret_cast<Method *>(self)->does(args + 1);
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

PyTypeObject method_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void ready()
{
    request_type.tp_name = "native.Request";
    request_type.tp_basicsize = sizeof(Request);
    request_type.tp_flags = Py_TPFLAGS_DEFAULT;
    request_type.tp_methods = request_methods;
    method_type.tp_name = "native.Method";
    method_type.tp_basicsize = sizeof(Method);
    method_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
    method_type.tp_call = PyVectorcall_Call;
    method_type.tp_vectorcall_offset = offsetof(Method, call);
    method_type.tp_descr_get = [](PyObject *self, PyObject *object, PyObject *) { return object ? PyMethod_New(self, object) : Py_NewRef(self); };
    if (PyType_Ready(&request_type) < 0 || PyType_Ready(&method_type) < 0)
        throw py::error_already_set();
}

py::object method(PyObject *(*does)(PyObject *const *))
{
    Method *one = PyObject_New(Method, &method_type);
    one->call = method_call;
    one->does = does;
    return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject *>(one));
}

} // namespace

PYBIND11_MODULE(native, module)
{
    ready();
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_rank(comm, &own);
    MPI_Comm_size(comm, &ranks);
    const std::pair<const char *, PyObject *(*)(PyObject *const *)> methods[] = {
        {"allreduce", all_reduce}, {"reduce", reduce}, {"broadcast", broadcast}, {"send", send}, {"recv", receive}, {"barrier", barrier},
        {"reduce_scatter_single", reduce_scatter}, {"all_gather_single", all_gather}, {"all_to_all_single", all_to_all},
        {"_reduce_scatter_base", reduce_scatter}, {"_allgather_base", all_gather}, {"alltoall_base", all_to_all}}; // as torch called them before 2.13
    py::dict found;
    for (const auto &[name, does] : methods)
        found[name] = method(does);
    module.attr("METHODS") = found;
}
