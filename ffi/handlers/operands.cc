#include "handlers/operands.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace turboattn {
namespace {

std::string Dims(const ffi::AnyBuffer& buffer) {
  std::ostringstream text;
  text << "[";
  const char* separator = "";
  for (int64_t dim : buffer.dimensions()) text << std::exchange(separator, ",") << dim;
  text << "]";
  return text.str();
}

std::string Join(std::initializer_list<ffi::DataType> types) {
  std::ostringstream text;
  const char* separator = "";
  for (ffi::DataType type : types) text << std::exchange(separator, " or ") << type;
  return text.str();
}

bool ToDType(ffi::DataType type, DType* dtype) {
  for (DType candidate : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
    if (XlaType(candidate) == type) {
      *dtype = candidate;
      return true;
    }
  }
  return false;
}

}  // namespace

Operands::Operands(std::string function, Context context, std::string_view names, ffi::RemainingArgs args, ffi::RemainingRets results)
    : function_(std::move(function)), context_(std::move(context)), results_(results) {
  std::fill(sizes_, sizes_ + kAxes, -1);
  for (size_t i = 0, start = 0; start < names.size(); ++i) {
    const size_t comma = std::min(names.find(',', start), names.size());
    const ffi::ErrorOr<ffi::AnyBuffer> buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) break;
    operands_.push_back({std::string(names.substr(start, comma - start)), *buffer});
    start = comma + 1;
  }
  const size_t named = names.empty() ? 0 : static_cast<size_t>(std::count(names.begin(), names.end(), ',')) + 1;
  if (named != args.size()) Fail("operands must name all " + std::to_string(args.size()) + " arrays, got " + std::string(names));
}

void Operands::Fail(const std::string& what) {
  if (ok()) error_ = function_ + ": " + what;
}

const Operands::Operand* Operands::Find(std::string_view name) const {
  for (const Operand& operand : operands_) {
    if (operand.name == name) return &operand;
  }
  return nullptr;
}

int Operands::rank(std::string_view name) const {
  const Operand* operand = Find(name);
  return operand == nullptr ? 0 : static_cast<int>(operand->buffer.dimensions().size());
}

DType Operands::FloatType(std::string_view name) {
  DType dtype = DType::kFloat32;
  const Operand* operand = Find(name);
  if (operand == nullptr) {
    Fail(std::string(name) + " must be given");
  } else if (!ToDType(operand->buffer.element_type(), &dtype)) {
    std::ostringstream text;
    text << name << " must be float32, bfloat16 or float16, got " << operand->buffer.element_type();
    Fail(text.str());
  }
  return dtype;
}

DType Operands::StoredType(std::string_view name) const {
  const Operand* operand = Find(name);
  for (DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16, DType::kFloat8E4M3}) {
    if (operand != nullptr && operand->buffer.element_type() == XlaType(dtype)) return dtype;
  }
  return DType::kInt8;
}

DType Operands::BiasType(std::initializer_list<const char*> names, DType dtype) {
  for (const char* name : names) {
    const Operand* operand = Find(name);
    if (operand != nullptr) return operand->buffer.element_type() == ffi::F32 ? DType::kFloat32 : dtype;  // the others are checked against it
  }
  return dtype;
}

void* Operands::Check(const std::string& label, const ffi::AnyBuffer& buffer, const char* axes, std::initializer_list<ffi::DataType> types) {
  if (!ok()) return nullptr;
  std::istringstream words(axes);
  std::string axis;
  size_t rank = 0;
  const auto dims = buffer.dimensions();
  bool fits = true;
  std::ostringstream expected;
  const size_t all_axes = static_cast<size_t>(std::count(axes, axes + std::strlen(axes), ' ')) + 1;
  for (; words >> axis; ++rank) {
    if (axis.back() == '?' && dims.size() < all_axes) {
      fits = fits && (size(axis[0]) < 0 || size(axis[0]) == 1);
      sizes_[static_cast<unsigned char>(axis[0]) % kAxes] = 1;
      --rank;
      continue;
    }
    const bool is_number = axis[0] >= '0' && axis[0] <= '9';
    const int64_t wanted = is_number ? std::stoll(axis) : size(axis[0]);
    if (wanted < 0 && rank < dims.size()) sizes_[static_cast<unsigned char>(axis[0]) % kAxes] = dims[rank];
    fits = fits && rank < dims.size() && (wanted < 0 || wanted == dims[rank]);
    expected << (rank == 0 ? "" : ",") << axis;
    if (!is_number && wanted >= 0) expected << "=" << wanted;
  }
  if (!fits || rank != dims.size()) {
    Fail(label + " must have shape [" + expected.str() + "], got " + Dims(buffer));
    return nullptr;
  }
  if (std::find(types.begin(), types.end(), buffer.element_type()) == types.end()) {
    std::ostringstream text;
    text << label << " must be " << Join(types) << ", got " << buffer.element_type();
    Fail(text.str());
    return nullptr;
  }
  return buffer.untyped_data();
}

void* Operands::Required(std::string_view name, const char* axes, std::initializer_list<ffi::DataType> types) {
  const Operand* operand = Find(name);
  if (operand == nullptr) {
    Fail(std::string(name) + " must be given");
    return nullptr;
  }
  return Check(operand->name, operand->buffer, axes, types);
}

void* Operands::Optional(std::string_view name, const char* axes, std::initializer_list<ffi::DataType> types) {
  return has(name) ? Required(name, axes, types) : nullptr;
}

void* Operands::Result(const char* label, const char* axes, std::initializer_list<ffi::DataType> types) {
  auto buffer = results_.get<ffi::AnyBuffer>(next_result_++);
  if (buffer.has_error()) {
    Fail(std::string(label) + " must be a result of the call");
    return nullptr;
  }
  return Check(label, **buffer, axes, types);
}

DType Operands::ResultFloatType(const char* label) {
  DType dtype = DType::kFloat32;
  auto buffer = results_.get<ffi::AnyBuffer>(next_result_);
  if (buffer.has_error()) {
    Fail(std::string(label) + " must be a result of the call");
  } else if (!ToDType((*buffer)->element_type(), &dtype)) {
    Fail(std::string(label) + " must be float32, bfloat16 or float16");
  }
  return dtype;
}

void* Operands::Written(std::string_view name) {
  const Operand* operand = Find(name);
  auto result = results_.get<ffi::AnyBuffer>(next_result_++);
  if (operand == nullptr || result.has_error()) {
    Fail(std::string(name) + " must be both an operand and a result");
    return nullptr;
  }
  const ffi::AnyBuffer& from = operand->buffer;
  const ffi::AnyBuffer& to = **result;
  const auto a = from.dimensions(), b = to.dimensions();
  if (from.element_type() != to.element_type() || !std::equal(a.begin(), a.end(), b.begin(), b.end())) {
    Fail(operand->name + " must have the shape and type of its result, got " + Dims(from) + " and " + Dims(to));
    return nullptr;
  }
  if (!ok()) return nullptr;
  if (from.untyped_data() != to.untyped_data() && from.size_bytes() > 0) {
    const Status status = CopyBytes(context_, to.untyped_data(), from.untyped_data(), from.size_bytes());
    if (!status.ok()) Fail(status.message());
  }
  return to.untyped_data();
}

}  // namespace turboattn
