// The buffers of one call, by name. Python checks all of this when it traces and says it better; here it is the
// backstop that keeps a kernel from reading a buffer of another shape or type.
#ifndef TURBOATTN_HANDLERS_OPERANDS_H_
#define TURBOATTN_HANDLERS_OPERANDS_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/params.h"
#include "handlers/context.h"
#include "xla/ffi/api/ffi.h"

namespace turboattn {

// Axes are written "B T H D": the first buffer that has a letter sets its size, later ones must agree; a number is that
// size; "L?" may be absent, which is a size of 1. The first thing that does not fit is kept as the error; everything
// after it returns null or 0, and the handler asks error() once, at the end.
class Operands {
 public:
  // names: the comma-joined `operands` attribute, in the order of the arguments.
  Operands(std::string function, Context context, std::string_view names, ffi::RemainingArgs args,
           ffi::RemainingRets results);

  bool has(std::string_view name) const { return Find(name) != nullptr; }
  int rank(std::string_view name) const;
  // Element type of an operand, if it is one of E; anything else is an error.
  DType FloatType(std::string_view name);
  // Element type of an array that is copied as bytes: uint8 codes count as int8.
  DType StoredType(std::string_view name) const;
  // Type of the biases that are present: all float32, or all E. E when there is none.
  DType BiasType(std::initializer_list<const char*> names, DType dtype);

  void* Required(std::string_view name, const char* axes, std::initializer_list<ffi::DataType> types);
  // Null when the operand is absent.
  void* Optional(std::string_view name, const char* axes, std::initializer_list<ffi::DataType> types);
  const int32_t* Ints(std::string_view name, const char* axes) {
    return static_cast<int32_t*>(Required(name, axes, {ffi::S32}));
  }
  const int32_t* OptionalInts(std::string_view name, const char* axes) {
    return static_cast<int32_t*>(Optional(name, axes, {ffi::S32}));
  }
  const float* OptionalFloats(std::string_view name, const char* axes) {
    return static_cast<float*>(Optional(name, axes, {ffi::F32}));
  }

  // The next result. `label` is for error texts.
  void* Result(const char* label, const char* axes, std::initializer_list<ffi::DataType> types);
  // Element type of the next result, if it is one of E.
  DType ResultFloatType(const char* label);
  // The next result, which continues operand `name`: XLA aliases the two when it can, else the operand is copied first.
  void* Written(std::string_view name);

  // The last result of a CUDA call, uint8[bytes] of at least `needed` bytes; nothing on the CPU and when none is
  // needed.
  Workspace ScratchResult(int64_t needed);

  // Size of an axis that a buffer has set.
  int64_t size(char axis) const { return sizes_[static_cast<unsigned char>(axis) % kAxes]; }
  void Fail(const std::string& what);
  bool ok() const { return error_.empty(); }
  ffi::Error error() const { return ok() ? ffi::Error::Success() : ffi::Error::InvalidArgument(error_); }

 private:
  static constexpr int kAxes = 128;
  struct Operand {
    std::string name;
    ffi::AnyBuffer buffer;
  };
  const Operand* Find(std::string_view name) const;
  std::string Expected(const char* axes) const;
  void* Check(const std::string& label, const ffi::AnyBuffer& buffer, const char* axes,
              std::initializer_list<ffi::DataType> types);

  std::string function_;
  Context context_;
  std::vector<Operand> operands_;
  ffi::RemainingRets results_;
  size_t next_result_ = 0;
  int64_t sizes_[kAxes];
  std::string error_;
};

// Handlers run so far in this process. A captured CUDA graph replays without any.
int64_t HandlerCalls();

inline ffi::DataType XlaType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ffi::F32;
    case DType::kBfloat16:
      return ffi::BF16;
    case DType::kFloat16:
      return ffi::F16;
    case DType::kFloat8E4M3:
      return ffi::F8E4M3FN;
    default:
      return ffi::U8;  // int8 and int4 codes
  }
}

}  // namespace turboattn

#endif  // TURBOATTN_HANDLERS_OPERANDS_H_
