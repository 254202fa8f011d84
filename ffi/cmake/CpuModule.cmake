# _cpu: the handlers over the CPU kernels.
nanobind_add_module(_cpu NB_STATIC
  ffi/module_cpu.cc
  ${TURBOATTN_CORE_SOURCES}
  ffi/handlers/append_kv.cc
  ffi/handlers/attention.cc
  ffi/handlers/copy_pages.cc
  ffi/handlers/gather_kv.cc
  ffi/handlers/handlers.cc
  ffi/handlers/make_plan.cc
  ffi/handlers/merge_partials.cc
  ffi/handlers/operands.cc
  ffi/handlers/paged_attention.cc
  ffi/handlers/paged_attention_step.cc
  ffi/handlers/paged_operands.cc
  ffi/handlers/ragged_attention.cc
  ffi/kernels/cpu/append.cc
  ffi/kernels/cpu/attention.cc
  ffi/kernels/cpu/attention_tile.cc
  ffi/kernels/cpu/copy_pages.cc
  ffi/kernels/cpu/gather.cc
  ffi/kernels/cpu/merge.cc
  ffi/kernels/cpu/registry_table.cc)
target_compile_definitions(_cpu PRIVATE TURBOATTN_CPU)
target_include_directories(_cpu PRIVATE ffi)
target_include_directories(_cpu SYSTEM PRIVATE ${TURBOATTN_XLA_INCLUDE})
target_link_libraries(_cpu PRIVATE Threads::Threads)
# The bytes of encoded rows are part of the contract: no a * b + c may become one fma. (nanobind alone would optimise
# for size.)
target_compile_options(_cpu PRIVATE -O3 -ffp-contract=off -Wall -Wextra)
# What static libraries define stays inside: where the linker finds only a static libstdc++, its unique symbols (the
# locale's among them) would otherwise mix with those of jaxlib's copy.
target_link_options(_cpu PRIVATE $<$<PLATFORM_ID:Linux>:LINKER:--exclude-libs,ALL>)
install(TARGETS _cpu LIBRARY DESTINATION jax_turboattn)
