// Python's view of the C++ core. No logic here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "board.h"
#include "copy_plan.h"
#include "shared_segment.h"
#include "shm_transport.h"
#ifdef ULYSSES_OP_WITH_CUDA
#include "cuda_driver.h"
#include "cuda_transport.h"
#endif

namespace py = pybind11;

namespace ulysses {
namespace {

// A child after fork() has none of its parent's threads, and nothing of a transport that it may touch, not even to
// destroy it.
template <typename Transport>
struct LeaveToParent {
  pid_t owner = ::getpid();
  void operator()(Transport* transport) const {
    if (::getpid() == owner) delete transport;
  }
};
template <typename Transport>
using TransportClass = py::class_<Transport, std::unique_ptr<Transport, LeaveToParent<Transport>>>;

using Release = py::call_guard<py::gil_scoped_release>;

Direction direction_of(const std::string& name) {
  if (name == "scatter_heads") return Direction::kScatterHeads;
  if (name == "gather_heads") return Direction::kGatherHeads;
  throw std::invalid_argument("direction is '" + name + "', expected 'scatter_heads' or 'gather_heads'");
}

std::shared_ptr<CopyPlan> plan_copies(const std::string& direction, const Dims& shape, const Dims& strides,
                                      int64_t itemsize, const std::vector<std::pair<int64_t, int64_t>>& heads,
                                      const std::vector<int64_t>& seq_lens, int rank) {
  std::vector<HeadRange> ranges;
  for (const auto& [start, stop] : heads) ranges.push_back({start, stop});
  return std::make_shared<CopyPlan>(
      make_copy_plan(direction_of(direction), shape, strides, itemsize, ranges, seq_lens, rank));
}

py::object signal_name(const Failure& failure) {
  if (!failure.signal) return py::none();
  return py::str(*failure.signal == Signal::kReady ? "READY" : "DONE");
}

void bind_copy_plan(py::module_& m) {
  py::class_<PitchedCopy>(m, "PitchedCopy")
      .def_readonly("peer", &PitchedCopy::peer)
      .def_readonly("src_offset_bytes", &PitchedCopy::src_offset_bytes)
      .def_readonly("src_pitch_bytes", &PitchedCopy::src_pitch_bytes)
      .def_readonly("dst_offset_bytes", &PitchedCopy::dst_offset_bytes)
      .def_readonly("dst_pitch_bytes", &PitchedCopy::dst_pitch_bytes)
      .def_readonly("width_bytes", &PitchedCopy::width_bytes)
      .def_readonly("height", &PitchedCopy::height);
  py::class_<CopyPlan, std::shared_ptr<CopyPlan>>(m, "CopyPlan")
      .def_readonly("copies", &CopyPlan::copies)
      .def_readonly("own", &CopyPlan::own);
  py::class_<Route, std::shared_ptr<Route>>(m, "Route")
      .def(py::init([](const CopyPlan& plan, std::vector<uintptr_t> targets, size_t place_bytes) {
             return std::make_shared<Route>(Route{plan, std::move(targets), place_bytes});
           }),
           py::arg("plan"), py::arg("targets"), py::arg("place_bytes"));
  m.def("make_copy_plan", &plan_copies, py::arg("direction"), py::arg("shape"), py::arg("strides"), py::arg("itemsize"),
        py::arg("heads"), py::arg("seq_lens"), py::arg("rank"));
  m.def("rows_dense", &rows_dense, py::arg("shape"), py::arg("strides"));
}

void bind_shared_memory(py::module_& m) {
  m.def(
      "make_private", [](uintptr_t address, size_t size) { make_private(reinterpret_cast<void*>(address), size); },
      py::arg("address"), py::arg("size_bytes"));
  py::class_<SharedSegment, std::shared_ptr<SharedSegment>>(m, "SharedSegment", py::buffer_protocol())
      .def_static(
          "create",
          [](const std::string& name, size_t size, std::optional<size_t> reserved) {
            return std::make_shared<SharedSegment>(SharedSegment::create(name, size, reserved.value_or(size)));
          },
          py::arg("name"), py::arg("size_bytes"), py::arg("reserved_bytes") = py::none(), Release())
      .def("reserve", &SharedSegment::reserve, py::arg("offset"), py::arg("size_bytes"), Release())
      .def_static(
          "open",
          [](const std::string& name, size_t size) {
            return std::make_shared<SharedSegment>(SharedSegment::open(name, size));
          },
          py::arg("name"), py::arg("size_bytes"), Release())
      .def_static("unlink", &SharedSegment::unlink, py::arg("name"))
      .def_property_readonly("address",
                             [](const SharedSegment& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_property_readonly("size_bytes", &SharedSegment::size_bytes)
      .def_buffer([](SharedSegment& self) {
        return py::buffer_info(static_cast<uint8_t*>(self.data()), static_cast<py::ssize_t>(self.size_bytes()));
      });
  py::class_<Failure>(m, "Failure")
      .def_property_readonly("kind", [](const Failure& self) { return kind_name(self.kind); })
      .def_property_readonly("signal", &signal_name)
      .def_readonly("peers", &Failure::peers)
      .def_readonly("seconds", &Failure::seconds)
      .def_property_readonly("message", [](const Failure& self) {
        // Cut off at a number of bytes, it may end in the middle of a character.
        const auto size = static_cast<Py_ssize_t>(self.message.size());
        PyObject* text = PyUnicode_DecodeUTF8(self.message.data(), size, "replace");
        if (text == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::str>(text);
      });
  py::class_<Board, std::shared_ptr<Board>>(m, "Board")
      .def_static("size_bytes", &Board::size_bytes, py::arg("world_size"))
      .def(py::init<std::shared_ptr<SharedSegment>, int, int>(), py::arg("segment"), py::arg("rank"),
           py::arg("world_size"))
      .def("register_self", &Board::register_self)
      .def("watch_peers", &Board::watch_peers)
      .def("aborted", &Board::aborted)
      .def("peer_gone", &Board::peer_gone, py::arg("peer"))
      .def("signalled", &Board::signalled, py::arg("peer"));
  TransportClass<ShmTransport>(m, "ShmTransport")
      .def_property_readonly_static("PLACES_OFFSET", [](const py::object&) { return ShmTransport::places_offset(); })
      .def(py::init<std::shared_ptr<Board>, double, bool, bool>(), py::arg("board"), py::arg("timeout_s"),
           py::arg("skip_ready"), py::arg("skip_done"))
      .def("begin", &ShmTransport::begin, py::arg("ready"))
      .def(
          "put",
          [](ShmTransport& self, std::shared_ptr<Route> route, uintptr_t source) {
            self.put(std::move(route), source);
          },
          py::arg("route"), py::arg("source"))
      .def("end", &ShmTransport::end, py::arg("done"))
      .def(
          "wait",
          [](ShmTransport& self, uint64_t number) {
            // In slices, so that an interrupt gets through.
            while (!self.wait_for(number, 0.1)) {
              py::gil_scoped_acquire gil;
              if (PyErr_CheckSignals() != 0) throw py::error_already_set();
            }
          },
          py::arg("number"), Release())
      .def("failure", &ShmTransport::failure)
      .def(
          "abort",
          [](ShmTransport& self, const std::string& kind, const std::string& message) {
            self.abort(kind_of(kind), message);
          },
          py::arg("kind"), py::arg("message"), Release())
      .def("idle", &ShmTransport::idle)
      .def("shutdown", &ShmTransport::shutdown, py::arg("grace_s"), Release());
}

#ifdef ULYSSES_OP_WITH_CUDA
void bind_cuda(py::module_& m) {
  py::class_<CudaDeviceFacts>(m, "CudaDeviceFacts")
      .def_readonly("driver_version", &CudaDeviceFacts::driver_version)
      .def_readonly("stream_memory_operations", &CudaDeviceFacts::stream_memory_operations)
      .def_readonly("copy_engines", &CudaDeviceFacts::copy_engines);
  m.def("cuda_current_context", &cuda_current_context);
  m.def("cuda_device_facts", &cuda_device_facts, py::arg("bus_id"));
  m.def("cuda_can_access_peer", &cuda_can_access_peer, py::arg("bus_id"), py::arg("peer_bus_id"));
  py::class_<CudaIpcBuffer, std::shared_ptr<CudaIpcBuffer>>(m, "CudaIpcBuffer")
      .def(py::init<uintptr_t, size_t>(), py::arg("context"), py::arg("size_bytes"), Release())
      .def_property_readonly("address", &CudaIpcBuffer::address)
      .def("handle", [](const CudaIpcBuffer& self) { return py::bytes(self.handle()); });
  py::class_<CudaIpcMapping, std::shared_ptr<CudaIpcMapping>>(m, "CudaIpcMapping")
      .def(py::init([](uintptr_t context, const py::bytes& handle, size_t size) {
             return std::make_shared<CudaIpcMapping>(context, static_cast<std::string>(handle), size);
           }),
           py::arg("context"), py::arg("handle"), py::arg("size_bytes"))
      .def_property_readonly("address", &CudaIpcMapping::address);
  TransportClass<CudaTransport>(m, "CudaTransport")
      .def_static("pad_bytes", &CudaTransport::pad_bytes, py::arg("world_size"))
      .def(py::init([](uintptr_t context, std::shared_ptr<Board> board, std::vector<uintptr_t> pads, double timeout_s,
                       bool skip_ready, bool skip_done, bool low_priority, size_t own_slices_late, bool rotated) {
             return new CudaTransport(context, std::move(board), std::move(pads), timeout_s, skip_ready, skip_done,
                                      CudaTransport::Tuning{low_priority, own_slices_late, rotated});
           }),
           py::arg("context"), py::arg("board"), py::arg("pads"), py::arg("timeout_s"), py::arg("skip_ready"),
           py::arg("skip_done"), py::arg("low_priority"), py::arg("own_slices_late"), py::arg("rotated"))
      .def_property_readonly("copy_stream", &CudaTransport::copy_stream)
      .def_property_readonly("own_stream", &CudaTransport::own_stream)
      .def("capture_id", &CudaTransport::capture_id, py::arg("stream"))
      .def(
          "begin",
          [](CudaTransport& self, uint64_t ready, const std::set<uintptr_t>& readers, bool capturing, bool open_ended,
             std::shared_ptr<Route> route, uintptr_t source, uintptr_t own_target, uintptr_t stream) {
            return self.begin(ready, readers, capturing, open_ended, {std::move(route), source, own_target, stream});
          },
          py::arg("ready"), py::arg("readers"), py::arg("capturing"), py::arg("open_ended"), py::arg("route"),
          py::arg("source"), py::arg("own_target"), py::arg("stream"), Release())
      .def(
          "put",
          [](CudaTransport& self, std::shared_ptr<Route> route, uintptr_t source, uintptr_t own_target,
             uintptr_t stream) { self.put({std::move(route), source, own_target, stream}); },
          py::arg("route"), py::arg("source"), py::arg("own_target"), py::arg("stream"), Release())
      .def("end", &CudaTransport::end, py::arg("done"), Release())
      .def("wait", &CudaTransport::wait, py::arg("stream"), py::arg("number"), py::arg("capturing"), Release())
      .def("failure", &CudaTransport::failure)
      .def(
          "abort",
          [](CudaTransport& self, const std::string& kind, const std::string& message) {
            self.abort(kind_of(kind), message);
          },
          py::arg("kind"), py::arg("message"), Release())
      .def("shutdown", &CudaTransport::shutdown, py::arg("grace_s"), Release());
}
#endif

}  // namespace
}  // namespace ulysses

PYBIND11_MODULE(_C, m) {
  ulysses::bind_copy_plan(m);
  ulysses::bind_shared_memory(m);
#ifdef ULYSSES_OP_WITH_CUDA
  ulysses::bind_cuda(m);
  m.attr("built_with_cuda") = true;
#else
  m.attr("built_with_cuda") = false;
#endif
}
