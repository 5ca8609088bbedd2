#include "group/buffer.hpp"

#include <ATen/MemoryOverlap.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <utility>

namespace muster::detail::group {
namespace {

void refuse(std::string_view doing, std::string_view fact, std::string_view remedy) {
  throw Error(ExitCode::usage, doing, fact, remedy);
}

void check(const at::Tensor& tensor, Access access, std::string_view doing) {
  if (!tensor.defined()) refuse(doing, "the tensor is undefined", "Give every rank a tensor, if an empty one");
  if (tensor.is_nested()) refuse(doing, "the tensor is nested", "Move its parts one by one");
  if (tensor.is_quantized()) refuse(doing, "the tensor is quantised", "Use int_repr() or dequantize()");
  if (tensor.layout() != at::kStrided)
    refuse(doing, c10::str("the tensor's layout is ", tensor.layout()), "Only dense tensors are moved; use to_dense()");
  if (!tensor.is_cpu() && !tensor.is_cuda())
    refuse(doing, "the tensor is on " + tensor.device().str(), "Move it to the CPU first");
  if (access != Access::read && at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    refuse(doing, "elements of the tensor share memory, so that it cannot be written", "Use clone() or contiguous()");
}

}  // namespace

std::optional<comm::Dtype> dtype_of(at::ScalarType type) noexcept {
  using enum comm::Dtype;
  constexpr std::pair<at::ScalarType, comm::Dtype> known[] = {
      {at::kByte, u8},    {at::kChar, i8},          {at::kShort, i16},          {at::kInt, i32},
      {at::kLong, i64},   {at::kHalf, f16},         {at::kBFloat16, bf16},      {at::kFloat, f32},
      {at::kDouble, f64}, {at::kComplexFloat, c64}, {at::kComplexDouble, c128}, {at::kBool, boolean}};
  for (const auto& [theirs, ours] : known)
    if (theirs == type) return ours;
  return std::nullopt;
}

Buffer::Buffer(const at::Tensor& tensor, Access access, std::string_view doing) : access_(access) {
  check(tensor, access, doing);
  const at::NoGradGuard no_grad;
  // The memory of a conjugate or negative view does not hold the values of its elements.
  if (tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    memory_ = tensor.detach();
    return;
  }
  memory_ =
      at::empty(tensor.sizes(),
                tensor.options().device(at::kCPU).requires_grad(false).memory_format(at::MemoryFormat::Contiguous));
  if (access != Access::write) memory_.copy_(tensor);
  if (access != Access::read) target_ = tensor;
}

void* Buffer::data() const {
  return access_ == Access::read ? const_cast<void*>(memory_.const_data_ptr()) : memory_.mutable_data_ptr();
}

comm::Message Buffer::message(int rank, std::size_t first, std::size_t count) const {
  const auto bytes = static_cast<std::size_t>(memory_.element_size());
  const auto per_element = bytes / comm::size_of(wire_type());
  return {static_cast<std::byte*>(data()) + first * bytes, count * per_element, rank};
}

void Buffer::scale(const at::Scalar& factor) {
  const at::NoGradGuard no_grad;
  if (access_ == Access::read)
    memory_ = memory_.mul(factor);
  else
    memory_.mul_(factor);
}

void Buffer::average_over(int ranks) {
  if (access_ != Access::read) divisor_ = ranks;
  const auto wide = at::toOpMathType(scalar_type());
  if (wide == scalar_type()) return;
  const at::NoGradGuard no_grad;
  if (access_ != Access::read && !target_.defined()) target_ = memory_;
  memory_ = memory_.to(wide);
}

void Buffer::finish() {
  const at::NoGradGuard no_grad;
  if (divisor_ != 1) memory_.div_(divisor_);
  if (target_.defined()) target_.copy_(memory_);
}

}  // namespace muster::detail::group
