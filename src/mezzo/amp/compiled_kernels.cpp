// The way of a call that needs no cast, compiled: one boxed kernel for every operator, above the Python one.
//
// It knows nothing of policies. Python decides a call the first time and, where the answer is 'as it is', says so
// (`remember`); later calls with the same policy and the same dtypes go straight on. All others go to the Python kernel.

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

// A policy, the dtype that torch's autocast is set to, and the dtypes of the tensors.
struct Situation {
  uint64_t policy = 0;
  uint64_t autocast_dtype = 0;
  uint64_t tensors = 0;
  bool operator==(const Situation& other) const {
    return policy == other.policy && autocast_dtype == other.autocast_dtype && tensors == other.tensors;
  }
};

struct HashSituation {
  size_t operator()(const Situation& s) const {
    return std::hash<uint64_t>()(s.tensors * 0x9E3779B97F4A7C15ull + s.policy * 64 + s.autocast_dtype);
  }
};

struct Operator {
  c10::SafeKernelFunction python;
  std::vector<int64_t> slots;  // of the tensors that the Python kernel looks at
  int64_t dtype_slot;          // of a result dtype that the caller may ask for; -1: there is none
  c10::DispatchKeySet off;     // autocast keys that are off inside
  std::shared_mutex lock;
  std::unordered_set<Situation, HashSituation> as_it_is;
};

struct Device {
  std::unordered_map<c10::OperatorHandle, std::unique_ptr<Operator>> operators;
  std::unique_ptr<torch::Library> library;
};

Device devices[2];
std::shared_mutex devices_lock;
// An operator, once there, is never freed: another thread may be in its kernel.
std::vector<std::unique_ptr<Operator>> covered_before;
const c10::DeviceType device_types[2] = {c10::DeviceType::CPU, c10::DeviceType::CUDA};
const c10::DispatchKey keys[2] = {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA};

thread_local uint64_t current_policy = 0;  // 0: none, or one that only Python knows of
thread_local Operator* last_operator = nullptr;
thread_local Situation last_situation;

// Seven bits a tensor: its dtype and whether it has no dimension. Runs within a list count once.
class Dtypes {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const uint64_t code = (static_cast<uint64_t>(tensor.scalar_type()) << 1 | (tensor.dim() == 0)) + 1;
    if (in_list && code == last) return;
    last = code;
    fits = fits && code < 128 && count < 9;
    value = value << 7 | code;
    ++count;
  }
  void enter_list() { in_list = true, last = 0; }
  void leave_list() { in_list = false; }
  uint64_t value = 0;
  bool fits = true;

 private:
  bool in_list = false;
  uint64_t last = 0;
  int count = 0;
};

bool read_dtypes(const Operator& here, const torch::jit::Stack& stack, size_t first, size_t arguments, uint64_t* out) {
  Dtypes dtypes;
  for (const int64_t slot : here.slots) {
    if (slot >= static_cast<int64_t>(arguments)) break;
    const c10::IValue& value = stack[first + slot];
    if (value.isTensor()) {
      dtypes.add(value.toTensor());
    } else if (value.isTensorList()) {
      dtypes.enter_list();
      for (const at::Tensor& tensor : value.toTensorList()) dtypes.add(tensor);
      dtypes.leave_list();
    } else if (!value.isNone()) {
      return false;
    }
  }
  *out = dtypes.value;
  return dtypes.fits;
}

template <int index>
void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keyset, torch::jit::Stack* stack) {
  Operator* found;
  {
    std::shared_lock<std::shared_mutex> reading(devices_lock);
    found = devices[index].operators.at(op).get();
  }
  Operator& here = *found;
  // Under a transform of torch.func Python decides: autocast is on again below, and only the policy can be off there.
  const bool transforms = c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
  const bool decides = current_policy != 0 && !transforms && torch::autograd::get_current_graph_task_id() == -1;
  Situation situation{current_policy, static_cast<uint64_t>(at::autocast::get_autocast_dtype(device_types[index])), 0};
  const size_t arguments = op.schema().arguments().size();
  const size_t first = stack->size() - arguments;
  const bool asks = here.dtype_slot >= 0 && !(*stack)[first + here.dtype_slot].isNone();
  if (decides && !asks && read_dtypes(here, *stack, first, arguments, &situation.tensors)) {
    bool known;
    {
      std::shared_lock<std::shared_mutex> reading(here.lock);
      known = here.as_it_is.count(situation) > 0;
    }
    if (known) {
      c10::impl::ExcludeDispatchKeyGuard guard(here.off);
      op.callBoxed(stack);
      return;
    }
    last_operator = &here;
    last_situation = situation;
  } else {
    last_operator = nullptr;
  }
  struct Forget {  // also after an exception: what is remembered belongs to this call
    ~Forget() { last_operator = nullptr; }
  } forget;
  here.python.callBoxed(op, keyset, stack);
}

int index_of(const std::string& device_type) { return device_type == "cuda" ? 1 : 0; }

// Put the compiled kernel above the Python one that is there now.
void cover(const std::string& device_type, const std::string& name, const std::string& overload,
           std::vector<int64_t> slots, int64_t dtype_slot, bool both_off) {
  const int index = index_of(device_type);
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  c10::DispatchKeySet off(keys[index]);
  if (both_off) off = off | c10::DispatchKeySet(keys[1 - index]);
  Device& device = devices[index];
  {
    std::unique_lock<std::shared_mutex> writing(devices_lock);
    if (device.operators.count(op)) covered_before.push_back(std::move(device.operators[op]));
    device.operators[op] = std::unique_ptr<Operator>(
        new Operator{op.getComputedKernelForDispatchKey(keys[index]), std::move(slots), dtype_slot, off, {}, {}});
  }
  if (!device.library) {
    device.library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", keys[index], __FILE__, __LINE__);
  }
  const std::string full = overload.empty() ? name : name + "." + overload;
  if (index == 0) {
    device.library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel<0>>());
  } else {
    device.library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel<1>>());
  }
}

void uncover_all() {
  for (Device& device : devices) device.library.reset();
  last_operator = nullptr;
}

void remember() {
  if (last_operator == nullptr) return;
  std::unique_lock<std::shared_mutex> writing(last_operator->lock);
  last_operator->as_it_is.insert(last_situation);
  last_operator = nullptr;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_policy", [](uint64_t number) { current_policy = number; });
  m.def("cover", torch::wrap_pybind_function(&cover));  // torch's warnings become Python's
  m.def("uncover_all", &uncover_all);
  m.def("remember", &remember);
}
