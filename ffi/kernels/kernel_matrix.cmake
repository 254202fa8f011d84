# THE list of compiled CUDA kernels. One row = one kernel entry = one generated translation unit (<phase>.cu.in).
#
#   phase|family|head_dim|value_dim|q dtype|kv dtype
#
# head_dim, value_dim: a number, or `any` for kernels that take it at run time. kv dtype: what the cache stores; an
# unquantised cache has the q dtype, and so has a phase without a cache. Both are `any` where a kernel moves bytes. To
# add a kernel, add a row; to add a family, add its name and its targets here.

# A cubin loads only on GPUs of its own major version, so each family lists the targets it is compiled for; PTX
# (-virtual) serves newer ones.
set(TURBOATTN_FAMILIES simt sm75 sm80 sm90)
set(TURBOATTN_TARGETS_simt 75-real 80-real 90-real 75-virtual)  # no tensor cores: one source for every card
set(TURBOATTN_TARGETS_sm75 75-real 75-virtual)                  # mma m16n8k8; on newer cards through its PTX
set(TURBOATTN_TARGETS_sm80 80-real 90-real 80-virtual)          # mma m16n8k16 + cp.async; 80 serves 86 and 89 too
set(TURBOATTN_TARGETS_sm90 90a-real)                            # wgmma + TMA, or code for it alone

# The words of a row, what they are in core/desc.h and core/params.h, and the dtypes' long names.
set(TURBOATTN_PHASES append attention copy_pages decode gather merge prefill)
set(TURBOATTN_FOLDER_attention prefill)  # plain arrays and pages: one kernel; any other phase's folder has its name
set(TURBOATTN_ENUM_append kAppend)
set(TURBOATTN_ENUM_attention kAttention)
set(TURBOATTN_ENUM_copy_pages kCopyPages)
set(TURBOATTN_ENUM_decode kDecode)
set(TURBOATTN_ENUM_gather kGather)
set(TURBOATTN_ENUM_merge kMerge)
set(TURBOATTN_ENUM_prefill kPrefill)
set(TURBOATTN_Q_DTYPES fp32 bf16 fp16 any)
set(TURBOATTN_KV_DTYPES fp32 bf16 fp16 int8 int4 fp8 any)
set(TURBOATTN_DTYPE_any std::nullopt)
set(TURBOATTN_DTYPE_fp32 DType::kFloat32)
set(TURBOATTN_DTYPE_bf16 DType::kBfloat16)
set(TURBOATTN_DTYPE_fp16 DType::kFloat16)
set(TURBOATTN_DTYPE_int8 DType::kInt8)
set(TURBOATTN_DTYPE_int4 DType::kInt4)
set(TURBOATTN_DTYPE_fp8 DType::kFloat8E4M3)
set(TURBOATTN_NAME_fp32 float32)
set(TURBOATTN_NAME_bf16 bfloat16)
set(TURBOATTN_NAME_fp16 float16)
set(TURBOATTN_NAME_int8 int8)
set(TURBOATTN_NAME_int4 int4)
set(TURBOATTN_NAME_fp8 float8_e4m3fn)

set(TURBOATTN_KERNEL_MATRIX
  "append|simt|any|any|bf16|bf16"
  "append|simt|any|any|bf16|int8"
  "append|simt|any|any|bf16|int4"
  "append|simt|any|any|bf16|fp8"
  "append|simt|any|any|fp16|fp16"
  "append|simt|any|any|fp16|int8"
  "append|simt|any|any|fp16|int4"
  "append|simt|any|any|fp16|fp8"

  # Of one phase, the family that is better where it suits a call comes first.
  "attention|sm90|64|64|bf16|bf16"
  "attention|sm90|64|64|fp16|fp16"
  "attention|sm90|128|128|bf16|bf16"
  "attention|sm90|128|128|fp16|fp16"
  "attention|sm90|192|128|bf16|bf16"
  "attention|sm90|192|128|fp16|fp16"
  "attention|sm90|256|256|bf16|bf16"
  "attention|sm90|256|256|fp16|fp16"
  "attention|sm80|64|64|bf16|bf16"
  "attention|sm80|64|64|fp16|fp16"
  "attention|sm80|128|128|bf16|bf16"
  "attention|sm80|128|128|fp16|fp16"
  "attention|sm80|256|256|bf16|bf16"
  "attention|sm80|256|256|fp16|fp16"

  "copy_pages|simt|any|any|any|any"

  "decode|sm90|128|128|bf16|int8"
  "decode|sm90|128|128|bf16|int4"
  "decode|sm90|128|128|bf16|fp8"
  "decode|sm90|128|128|fp16|int8"
  "decode|sm90|128|128|fp16|int4"
  "decode|sm90|128|128|fp16|fp8"
  "decode|sm80|64|64|bf16|bf16"
  "decode|sm80|64|64|bf16|int8"
  "decode|sm80|64|64|bf16|int4"
  "decode|sm80|64|64|bf16|fp8"
  "decode|sm80|64|64|fp16|fp16"
  "decode|sm80|64|64|fp16|int8"
  "decode|sm80|64|64|fp16|int4"
  "decode|sm80|64|64|fp16|fp8"
  "decode|sm80|128|128|bf16|bf16"
  "decode|sm80|128|128|bf16|int8"
  "decode|sm80|128|128|bf16|int4"
  "decode|sm80|128|128|bf16|fp8"
  "decode|sm80|128|128|fp16|fp16"
  "decode|sm80|128|128|fp16|int8"
  "decode|sm80|128|128|fp16|int4"
  "decode|sm80|128|128|fp16|fp8"
  "decode|sm80|256|256|bf16|bf16"
  "decode|sm80|256|256|bf16|int8"
  "decode|sm80|256|256|bf16|int4"
  "decode|sm80|256|256|bf16|fp8"
  "decode|sm80|256|256|fp16|fp16"
  "decode|sm80|256|256|fp16|int8"
  "decode|sm80|256|256|fp16|int4"
  "decode|sm80|256|256|fp16|fp8"

  "gather|simt|any|any|bf16|bf16"
  "gather|simt|any|any|bf16|int8"
  "gather|simt|any|any|bf16|int4"
  "gather|simt|any|any|bf16|fp8"
  "gather|simt|any|any|fp16|fp16"
  "gather|simt|any|any|fp16|int8"
  "gather|simt|any|any|fp16|int4"
  "gather|simt|any|any|fp16|fp8"

  "merge|simt|any|any|fp32|fp32"
  "merge|simt|any|any|bf16|bf16"
  "merge|simt|any|any|fp16|fp16"

  "prefill|sm90|64|64|bf16|bf16"
  "prefill|sm90|64|64|bf16|int8"
  "prefill|sm90|64|64|bf16|int4"
  "prefill|sm90|64|64|bf16|fp8"
  "prefill|sm90|64|64|fp16|fp16"
  "prefill|sm90|64|64|fp16|int8"
  "prefill|sm90|64|64|fp16|int4"
  "prefill|sm90|64|64|fp16|fp8"
  "prefill|sm90|128|128|bf16|bf16"
  "prefill|sm90|128|128|bf16|int8"
  "prefill|sm90|128|128|bf16|int4"
  "prefill|sm90|128|128|bf16|fp8"
  "prefill|sm90|128|128|fp16|fp16"
  "prefill|sm90|128|128|fp16|int8"
  "prefill|sm90|128|128|fp16|int4"
  "prefill|sm90|128|128|fp16|fp8"
  "prefill|sm90|192|128|bf16|bf16"
  "prefill|sm90|192|128|fp16|fp16"
  "prefill|sm90|256|256|bf16|bf16"
  "prefill|sm90|256|256|fp16|fp16"
  "prefill|sm80|64|64|bf16|bf16"
  "prefill|sm80|64|64|bf16|int8"
  "prefill|sm80|64|64|bf16|int4"
  "prefill|sm80|64|64|bf16|fp8"
  "prefill|sm80|64|64|fp16|fp16"
  "prefill|sm80|64|64|fp16|int8"
  "prefill|sm80|64|64|fp16|int4"
  "prefill|sm80|64|64|fp16|fp8"
  "prefill|sm80|128|128|bf16|bf16"
  "prefill|sm80|128|128|bf16|int8"
  "prefill|sm80|128|128|bf16|int4"
  "prefill|sm80|128|128|bf16|fp8"
  "prefill|sm80|128|128|fp16|fp16"
  "prefill|sm80|128|128|fp16|int8"
  "prefill|sm80|128|128|fp16|int4"
  "prefill|sm80|128|128|fp16|fp8"
  "prefill|sm80|256|256|bf16|bf16"
  "prefill|sm80|256|256|bf16|int8"
  "prefill|sm80|256|256|bf16|int4"
  "prefill|sm80|256|256|bf16|fp8"
  "prefill|sm80|256|256|fp16|fp16"
  "prefill|sm80|256|256|fp16|int8"
  "prefill|sm80|256|256|fp16|int4"
  "prefill|sm80|256|256|fp16|fp8"
)
