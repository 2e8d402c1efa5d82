// Runs torch's CUDA operators by the kernels of the CPU, on the simulated devices' memory. Loaded at the end of `import torch`.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Copy.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>
#include <set>
#include "sim.h"

using at::Tensor;
using c10::DispatchKey;
using torch::jit::Stack;
namespace {

struct Call { std::vector<SimRange> ranges; std::optional<at::Device> device; };
void* current_stream(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }
SimRange range_of(const Tensor& tensor, bool write) {
  int64_t extent = 1;
  for (int64_t i = 0; i < tensor.dim(); i++) extent += (tensor.size(i) - 1) * tensor.stride(i);
  return {tensor.const_data_ptr(), (size_t)extent * tensor.element_size(), write};
}
// The same memory as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor, bool write, Call& call) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  if (!call.device) call.device = tensor.device();
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.is_sparse()) {
    Tensor indices = on_cpu(tensor._indices(), write, call), values = on_cpu(tensor._values(), write, call);
    return at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes(), options)._coalesced_(tensor.is_coalesced());
  }
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  call.ranges.push_back(range_of(tensor, write));
  return at::from_blob(sim_memory(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}
Tensor on_device(const Tensor& tensor, at::Device device, const char* what) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_sparse()) {
    Tensor indices = on_device(tensor._indices(), device, what), values = on_device(tensor._values(), device, what);
    auto options = tensor.options().device(device);
    return at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes(), options)._coalesced_(tensor.is_coalesced());
  }
  Tensor source = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  auto options = source.options().device(device).pinned_memory(false).requires_grad(false);
  Tensor result = at::empty_strided(source.sizes(), source.strides(), options);
  if (source.numel()) {
    sim_touch(current_stream(device), what, range_of(result, true));
    memcpy(sim_memory(result.const_data_ptr()), source.const_data_ptr(), source.numel() * source.element_size());
  }
  return result;
}
// For one call the CPU's generator continues where the device's stands; that one advances.
struct Seeded {
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  Tensor before = cpu.get_state();
  Seeded(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
    auto generator = given && given->defined() ? *given : at::cuda::detail::getDefaultCUDAGenerator(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    auto* own = at::check_generator<at::CUDAGeneratorImpl>(generator);
    cpu.set_current_seed(own->current_seed() * 0x9E3779B97F4A7C15ull + own->philox_offset_per_thread());
    own->set_philox_offset_per_thread(own->philox_offset_per_thread() + 4);
  }
  ~Seeded() { cpu.set_state(before); }
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto originals = torch::jit::pop(*stack, arguments.size());
  Call call;
  Stack cpu;
  std::optional<at::Generator> generator;
  bool sparse = false;
  std::vector<std::pair<Tensor, Tensor>> outputs;  // empty out arguments, and what the CPU resizes and writes instead
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& value = originals[i];
    const bool write = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    auto convert = [&](const Tensor& tensor) { return on_cpu(tensor, write, call); };
    if (arguments[i].name() == "pin_memory") cpu.emplace_back();
    else if (value.isTensor()) {
      Tensor tensor = value.toTensor();
      sparse |= tensor.defined() && tensor.is_sparse();
      cpu.emplace_back(convert(tensor));
      if (tensor.defined() && tensor.is_cuda() && !tensor.is_sparse() && arguments[i].is_out() && !tensor.numel())
        outputs.emplace_back(tensor, cpu.back().toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
      cpu.emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) list.push_back(tensor ? std::optional(convert(*tensor)) : tensor);
      cpu.emplace_back(std::move(list));
    } else if (value.isDevice()) {
      if (value.toDevice().is_cuda()) call.device = value.toDevice();
      cpu.emplace_back(at::Device(at::kCPU));
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      cpu.emplace_back();
    } else cpu.push_back(value);
  }
  at::Device device = call.device && call.device->has_index() ? *call.device : at::Device(at::kCUDA, c10::cuda::current_device());
  c10::cuda::CUDAGuard guard(device);
  sim_run(current_stream(device), schema.name().c_str(), call.ranges, [&] {
    std::optional<Seeded> seeded;
    if (generator || op.hasTag(at::Tag::nondeterministic_seeded)) seeded.emplace(generator, device.index());
    op.redispatchBoxed(c10::DispatchKeySet(sparse ? DispatchKey::SparseCPU : DispatchKey::CPU), &cpu);
  });
  for (auto& [out, written] : outputs) if (written.numel()) {
    out.resize_(written.sizes());
    memcpy(sim_memory(out.const_data_ptr()), written.contiguous().const_data_ptr(), written.numel() * written.element_size());
  }
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const auto& value = cpu[cpu.size() - schema.returns().size() + i];
    const auto* info = schema.returns()[i].alias_info();
    if (info && info->isWrite()) {  // it is one of the arguments
      for (size_t k = 0; k < arguments.size(); k++)
        if (auto* own = arguments[k].alias_info(); own && own->isWrite() && own->beforeSets() == info->beforeSets()) {
          stack->push_back(originals[k]);
          break;
        }
    } else if (value.isTensor()) stack->emplace_back(on_device(value.toTensor(), device, schema.name().c_str()));
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(on_device(tensor, device, schema.name().c_str()));
      stack->emplace_back(std::move(list));
    } else stack->push_back(value);
  }
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.is_cuda() || self.device() != source.device()) return at::native::copy_(self, source, non_blocking);
  if (self.is_same(source)) return self;
  c10::cuda::CUDAGuard guard(self.device());
  Call call;
  Tensor to = on_cpu(self, true, call), from = on_cpu(source, false, call);
  sim_run(current_stream(self.device()), "copy_", call.ranges, [&] { to.copy_(from); });
  return self;
}

// --- operators that only CUDA has

template <class Function> auto computed(const char* what, std::initializer_list<std::optional<Tensor>> inputs, Function function) {
  Call call;
  std::vector<Tensor> cpu, results;
  for (auto& input : inputs) cpu.push_back(input ? on_cpu(*input, false, call) : Tensor());
  c10::cuda::CUDAGuard guard(*call.device);
  sim_run(current_stream(*call.device), what, call.ranges, [&] { results = function(cpu); });
  for (auto& result : results) result = on_device(result, *call.device, what);
  return results;
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  auto r = computed("lstm cell", {input_gates, hidden_gates, cell, input_bias, hidden_bias}, [](auto& t) -> std::vector<Tensor> {
    Tensor gates = t[0] + t[1];
    if (t[3].defined()) gates = gates + t[3] + t[4];
    auto g = gates.chunk(4, 1);
    Tensor in = g[0].sigmoid(), forget = g[1].sigmoid(), new_cell = g[2].tanh(), out = g[3].sigmoid();
    Tensor cell = forget * t[2] + in * new_cell;
    return {out * cell.tanh(), cell, at::cat({in, forget, new_cell, out}, 1)};
  });
  return {r[0], r[1], r[2]};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hidden, const std::optional<Tensor>& grad_cell,
                                                      const Tensor& before, const Tensor& cell, const Tensor& gates, bool has_bias) {
  auto r = computed("lstm cell backward", {grad_hidden, grad_cell, before, cell, gates}, [](auto& t) -> std::vector<Tensor> {
    auto g = t[4].chunk(4, 1);
    Tensor in = g[0], forget = g[1], new_cell = g[2], out = g[3], squashed = t[3].tanh();
    Tensor grad = t[1].defined() ? t[1] : at::zeros_like(t[3]), grad_out = at::zeros_like(out);
    if (t[0].defined()) {
      grad = grad + t[0] * out * (1 - squashed * squashed);
      grad_out = t[0] * squashed * out * (1 - out);
    }
    Tensor grad_gates = at::cat({grad * new_cell * in * (1 - in), grad * t[2] * forget * (1 - forget),
                                 grad * in * (1 - new_cell * new_cell), grad_out}, 1);
    return {grad_gates, grad * forget, grad_gates.sum(0)};
  });
  return {r[0], r[1], has_bias ? r[2] : Tensor()};
}
int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;
}

// Views, allocation and transfers stay torch's own.
bool stays(const c10::FunctionSchema& schema) {
  static const std::set<std::string> NAMES = {
      "empty", "empty_strided", "resize_", "set_", "_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory", "copy_", "is_set_to",
      "_efficientzerotensor", "_cudnn_init_dropout_state", "_fused_sdp_choice", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl",
      "_copy_from", "_copy_from_and_resize", "_resize_output_", "_indices", "_values", "indices", "values", "_coalesced_", "is_coalesced",
      "_nnz", "sparse_dim", "dense_dim", "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "_dimI", "_dimV",
      "copy_sparse_to_sparse_", "sparse_resize_", "sparse_resize_and_clear_"};
  const std::string& name = schema.name();
  if (name.rfind("aten::", 0) != 0 || name.find("cudnn") != std::string::npos || NAMES.count(name.substr(6))) return true;
  for (const auto& value : schema.returns()) if (value.alias_info() && !value.alias_info()->isWrite()) return true;
  return false;
}
std::vector<std::unique_ptr<torch::Library>>& libraries = *new std::vector<std::unique_ptr<torch::Library>>;
struct Quiet : c10::WarningHandler { void process(const c10::Warning&) override {} };
bool install() {
  Quiet quiet;  // torch warns of each kernel that is replaced
  auto* before = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto [key, cpu_key] : {std::pair(DispatchKey::CUDA, DispatchKey::CPU), std::pair(DispatchKey::SparseCUDA, DispatchKey::SparseCPU)}) {
    libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
    auto& library = *libraries.back();
    for (const auto& name : dispatcher.getAllOpNames()) {
      auto op = dispatcher.findSchema(name);
      if (!op || stays(op->schema())) continue;
      bool convolution = key == DispatchKey::CUDA && (name.name == "aten::convolution" || name.name == "aten::convolution_backward");
      if (!convolution && (!op->hasKernelForDispatchKey(key) || !op->hasComputedKernelForDispatchKey(cpu_key))) continue;
      std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
      library.impl((name.name.substr(6) + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
    if (key != DispatchKey::CUDA) continue;
    library.impl("copy_", &copy_);
    library.impl("_fused_sdp_choice", &plain_attention);
    library.impl("_thnn_fused_lstm_cell", &lstm_cell);
    library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  }
  c10::WarningUtils::set_warning_handler(before);
  return true;
}
const bool installed = install();
}  // namespace
