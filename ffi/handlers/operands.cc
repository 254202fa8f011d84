#include "handlers/operands.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

namespace turboattn {
namespace {

std::string Dims(const ffi::AnyBuffer& buffer) {
  std::string text = "[";
  for (int64_t dim : buffer.dimensions()) text += (text.size() > 1 ? "," : "") + std::to_string(dim);
  return text + "]";
}

// Names for error texts. Not operator<<: a stream needs a locale, and where the C++ library is linked into this module
// as well as into its host, the two locales' facets mix and the process dies.
std::string Name(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return "float32";
    case ffi::BF16:
      return "bfloat16";
    case ffi::F16:
      return "float16";
    case ffi::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::U8:
      return "uint8";
    case ffi::S32:
      return "int32";
    case ffi::U32:
      return "uint32";
    case ffi::PRED:
      return "bool";
    default:
      return "XLA type " + std::to_string(static_cast<int>(type));
  }
}

std::string Join(std::initializer_list<ffi::DataType> types) {
  std::string text;
  for (ffi::DataType type : types) text += (text.empty() ? "" : " or ") + Name(type);
  return text;
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

// One axis of "L? N K 2": its first character, and whether a '?' follows. `text` moves past it and the space.
struct Axis {
  char name;
  bool optional;
};
Axis NextAxis(const char** text) {
  const char* start = *text;
  const char* end = start;
  while (*end != '\0' && *end != ' ') ++end;
  *text = *end == ' ' ? end + 1 : end;
  return {*start, end[-1] == '?'};
}

std::atomic<int64_t> handler_calls{0};

}  // namespace

int64_t HandlerCalls() { return handler_calls.load(); }

Operands::Operands(std::string function, Context context, std::string_view names, ffi::RemainingArgs args,
                   ffi::RemainingRets results)
    : function_(std::move(function)), context_(std::move(context)), results_(results) {
  ++handler_calls;
  std::fill(sizes_, sizes_ + kAxes, -1);
  for (size_t i = 0, start = 0; start < names.size(); ++i) {
    const size_t comma = std::min(names.find(',', start), names.size());
    const ffi::ErrorOr<ffi::AnyBuffer> buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) break;
    operands_.push_back({std::string(names.substr(start, comma - start)), *buffer});
    start = comma + 1;
  }
  const size_t named = names.empty() ? 0 : static_cast<size_t>(std::count(names.begin(), names.end(), ',')) + 1;
  if (named != args.size())
    Fail("operands must name all " + std::to_string(args.size()) + " arrays, got " + std::string(names));
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
    Fail(std::string(name) + " must be float32, bfloat16 or float16, got " + Name(operand->buffer.element_type()));
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
    if (operand != nullptr)
      return operand->buffer.element_type() == ffi::F32 ? DType::kFloat32 : dtype;  // the others are checked against it
  }
  return dtype;
}

void* Operands::Check(const std::string& label, const ffi::AnyBuffer& buffer, const char* axes,
                      std::initializer_list<ffi::DataType> types) {
  if (!ok()) return nullptr;
  const auto dims = buffer.dimensions();
  const size_t all_axes = static_cast<size_t>(std::count(axes, axes + std::strlen(axes), ' ')) + 1;
  size_t rank = 0;
  bool fits = true;
  for (const char* rest = axes; *rest != '\0';) {
    const Axis axis = NextAxis(&rest);
    const bool is_number = axis.name >= '0' && axis.name <= '9';  // numbers have one digit
    const int64_t wanted = is_number ? axis.name - '0' : size(axis.name);
    const bool absent = axis.optional && dims.size() < all_axes;
    if (!absent && rank >= dims.size()) {
      fits = false;
      break;
    }
    const int64_t have = absent ? 1 : dims[rank++];
    if (wanted < 0) sizes_[static_cast<unsigned char>(axis.name) % kAxes] = have;
    fits = fits && (wanted < 0 || wanted == have);
  }
  if (!fits || rank != dims.size()) {
    Fail(label + " must have shape " + Expected(axes) + ", got " + Dims(buffer));
    return nullptr;
  }
  if (std::find(types.begin(), types.end(), buffer.element_type()) == types.end()) {
    Fail(label + " must be " + Join(types) + ", got " + Name(buffer.element_type()));
    return nullptr;
  }
  return buffer.untyped_data();
}

// "[B=2,M=3]", as far as the axes are known.
std::string Operands::Expected(const char* axes) const {
  std::string text = "[";
  for (const char* rest = axes; *rest != '\0';) {
    const Axis axis = NextAxis(&rest);
    text += (text.size() > 1 ? "," : "") + std::string(1, axis.name);
    const bool is_number = axis.name >= '0' && axis.name <= '9';
    if (!is_number && size(axis.name) >= 0) text += "=" + std::to_string(size(axis.name));
  }
  return text + "]";
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

Workspace Operands::ScratchResult(int64_t needed) {
#if defined(TURBOATTN_CUDA)
  if (needed == 0) return {};
  auto buffer = results_.get<ffi::AnyBuffer>(next_result_++);
  if (buffer.has_error()) {
    Fail("the call must have a workspace of " + std::to_string(needed) + " bytes");
    return {};
  }
  const int64_t bytes = static_cast<int64_t>((*buffer)->size_bytes());
  if (bytes < needed) {
    Fail("workspace must have " + std::to_string(needed) + " bytes, got " + std::to_string(bytes));
  }
  return {(*buffer)->untyped_data(), bytes};
#else
  (void)needed;
  return {};
#endif
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
