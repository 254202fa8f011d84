// Attributes of the primitives, decoded by name into structs. Names and types are those that
// jax_turboattn/backends/ffi.py sends; XLA refuses a call with one missing, one too many or one of another type.
#ifndef TURBOATTN_HANDLERS_ATTRIBUTES_H_
#define TURBOATTN_HANDLERS_ATTRIBUTES_H_

#include <cstdint>
#include <string_view>

#include "handlers/paged_operands.h"
#include "xla/ffi/api/ffi.h"

namespace turboattn {

struct LinearAttributes {
  std::string_view operands;
  std::string_view family;  // of kernels, where the user names one, and the phase has it; else empty
  bool is_causal;
  float scale;
  float logits_soft_cap;
};

struct PagedAttributes {
  std::string_view operands;
  std::string_view family;
  bool is_causal;
  float scale;
  float logits_soft_cap;
  std::string_view kv_dtype;
  int32_t value_dim;
  int32_t cp_size;
  bool batch_invariant;
};

struct AppendAttributes {
  std::string_view operands;
  std::string_view kv_dtype;
  int32_t cp_size;
  int32_t rope_dim;
  int32_t rope_offset;
  bool rope_interleaved;
  float rope_attention_factor;
  int32_t rope_section_t;
  int32_t rope_section_h;
  int32_t rope_section_w;
  bool rope_sections_interleaved;
};

struct StepAttributes {
  std::string_view operands;
  std::string_view family;
  bool is_causal;
  float scale;
  float logits_soft_cap;
  std::string_view kv_dtype;
  int32_t value_dim;
  int32_t cp_size;
  bool batch_invariant;
  int32_t rope_dim;
  int32_t rope_offset;
  bool rope_interleaved;
  float rope_attention_factor;
  int32_t rope_section_t;
  int32_t rope_section_h;
  int32_t rope_section_w;
  bool rope_sections_interleaved;
  int32_t logn;
  bool logn_zero_based;
};

struct PlanAttributes {
  std::string_view operands;
  std::string_view family;
  std::string_view dtype;
  std::string_view kv_dtype;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t value_dim;
  int32_t page_size;
  int64_t num_tokens;
  int64_t max_pages;
  bool plain;  // calls in which decode reads a schedule
};

struct GatherAttributes {
  std::string_view operands;
  std::string_view kv_dtype;
};

struct OperandsOnly {
  std::string_view operands;
};

// The RoPE part of AppendAttributes or StepAttributes.
template <class Attributes>
RopeAttributes RopePart(const Attributes& a) {
  return {a.rope_dim,       a.rope_offset,    a.rope_interleaved, a.rope_attention_factor,
          a.rope_section_t, a.rope_section_h, a.rope_section_w,   a.rope_sections_interleaved};
}

}  // namespace turboattn

using xla::ffi::StructMember;

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(turboattn::LinearAttributes, StructMember<std::string_view>("operands"),
                                      StructMember<std::string_view>("family"), StructMember<bool>("is_causal"),
                                      StructMember<float>("scale"), StructMember<float>("logits_soft_cap"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(turboattn::PagedAttributes, StructMember<std::string_view>("operands"),
                                      StructMember<std::string_view>("family"), StructMember<bool>("is_causal"),
                                      StructMember<float>("scale"), StructMember<float>("logits_soft_cap"),
                                      StructMember<std::string_view>("kv_dtype"), StructMember<int32_t>("value_dim"),
                                      StructMember<int32_t>("cp_size"), StructMember<bool>("batch_invariant"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(turboattn::AppendAttributes, StructMember<std::string_view>("operands"),
                                      StructMember<std::string_view>("kv_dtype"), StructMember<int32_t>("cp_size"),
                                      StructMember<int32_t>("rope_dim"), StructMember<int32_t>("rope_offset"),
                                      StructMember<bool>("rope_interleaved"),
                                      StructMember<float>("rope_attention_factor"),
                                      StructMember<int32_t>("rope_section_t"), StructMember<int32_t>("rope_section_h"),
                                      StructMember<int32_t>("rope_section_w"),
                                      StructMember<bool>("rope_sections_interleaved"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    turboattn::StepAttributes, StructMember<std::string_view>("operands"), StructMember<std::string_view>("family"),
    StructMember<bool>("is_causal"), StructMember<float>("scale"), StructMember<float>("logits_soft_cap"),
    StructMember<std::string_view>("kv_dtype"), StructMember<int32_t>("value_dim"), StructMember<int32_t>("cp_size"),
    StructMember<bool>("batch_invariant"), StructMember<int32_t>("rope_dim"), StructMember<int32_t>("rope_offset"),
    StructMember<bool>("rope_interleaved"), StructMember<float>("rope_attention_factor"),
    StructMember<int32_t>("rope_section_t"), StructMember<int32_t>("rope_section_h"),
    StructMember<int32_t>("rope_section_w"), StructMember<bool>("rope_sections_interleaved"),
    StructMember<int32_t>("logn"), StructMember<bool>("logn_zero_based"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(turboattn::PlanAttributes, StructMember<std::string_view>("operands"),
                                      StructMember<std::string_view>("family"), StructMember<std::string_view>("dtype"),
                                      StructMember<std::string_view>("kv_dtype"), StructMember<int32_t>("num_q_heads"),
                                      StructMember<int32_t>("num_kv_heads"), StructMember<int32_t>("head_dim"),
                                      StructMember<int32_t>("value_dim"), StructMember<int32_t>("page_size"),
                                      StructMember<int64_t>("num_tokens"), StructMember<int64_t>("max_pages"),
                                      StructMember<bool>("plain"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(turboattn::GatherAttributes, StructMember<std::string_view>("operands"),
                                      StructMember<std::string_view>("kv_dtype"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(turboattn::OperandsOnly, StructMember<std::string_view>("operands"));

#endif  // TURBOATTN_HANDLERS_ATTRIBUTES_H_
