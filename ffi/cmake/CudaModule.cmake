# _cuda: the handlers over the CUDA kernels of kernel_matrix.cmake, one OBJECT library a kernel family, since targets
# are per library.
message(STATUS "nvcc: ${TURBOATTN_NVCC}; GPUs: ${TURBOATTN_ARCHS}")
set(CMAKE_CUDA_COMPILER "${TURBOATTN_NVCC}")
set(CMAKE_CUDA_ARCHITECTURES 75-real)  # for CMake's own compiler check; every library below sets its targets
# Static: the module then loads on a host without the toolkit and without a driver (cudart opens libcuda when it is
# first used). Never -lcuda.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
cmake_path(GET TURBOATTN_NVCC PARENT_PATH _cuda_root)
cmake_path(GET _cuda_root PARENT_PATH _cuda_root)
if(EXISTS "${_cuda_root}/lib/libcudart_static.a")  # the compiler wheels have lib/ and no lib64/, where nvcc looks
  set(CMAKE_CUDA_FLAGS_INIT "-L${_cuda_root}/lib")
endif()
enable_language(CUDA)

include(ffi/cmake/KernelMatrix.cmake)
include(ffi/kernels/kernel_matrix.cmake)
turboattn_selected_rows("${TURBOATTN_ARCHS}" _rows)
if(NOT _rows)
  message(FATAL_ERROR "no kernel row matches TURBOATTN_ONLY=`$ENV{TURBOATTN_ONLY}` for the GPUs ${TURBOATTN_ARCHS}")
endif()
turboattn_generate_sources("${_rows}" "${CMAKE_BINARY_DIR}/gen")

nanobind_add_module(_cuda NB_STATIC
  ffi/module_cuda.cc
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
  ${CMAKE_BINARY_DIR}/gen/registry_table.cc)
foreach(_family IN LISTS TURBOATTN_FAMILIES)
  if(TURBOATTN_SOURCES_${_family})
    turboattn_family_targets(${_family} "${TURBOATTN_ARCHS}" _targets)
    add_library(kernels_${_family} OBJECT ${TURBOATTN_SOURCES_${_family}})
    set_target_properties(kernels_${_family} PROPERTIES CUDA_ARCHITECTURES "${_targets}")
    target_include_directories(kernels_${_family} PRIVATE ffi)
    target_compile_options(kernels_${_family} PRIVATE
      -lineinfo -Xptxas=-warn-spills -Xcompiler=-fvisibility=hidden)
    target_link_libraries(_cuda PRIVATE kernels_${_family})
    list(LENGTH TURBOATTN_SOURCES_${_family} _count)
    message(STATUS "kernel family ${_family}: ${_count} rows for ${_targets}")
  endif()
endforeach()
target_compile_definitions(_cuda PRIVATE TURBOATTN_CUDA)
target_compile_options(_cuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>)
target_include_directories(_cuda PRIVATE ffi)
target_include_directories(_cuda SYSTEM PRIVATE ${TURBOATTN_XLA_INCLUDE} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# What static libraries define stays inside: where the linker finds only a static libstdc++, its unique symbols (the
# locale's among them) would otherwise mix with those of jaxlib's copy.
target_link_options(_cuda PRIVATE $<$<PLATFORM_ID:Linux>:LINKER:--exclude-libs,ALL>)
install(TARGETS _cuda LIBRARY DESTINATION jax_turboattn)
