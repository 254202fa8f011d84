# Sets TURBOATTN_CUDA_CHOICE (ON|OFF), TURBOATTN_ARCHS and TURBOATTN_NVCC from the script that the build backend uses
# too.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "_build_backend/cuda_choice.py")
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_SOURCE_DIR}/_build_backend/cuda_choice.py"
  OUTPUT_VARIABLE _choice OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_VARIABLE _error ERROR_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE _status)
if(NOT _status EQUAL 0)
  message(FATAL_ERROR "${_error}")
endif()
foreach(_pair IN ITEMS cuda:TURBOATTN_CUDA_CHOICE why:_why archs:TURBOATTN_ARCHS nvcc:TURBOATTN_NVCC)
  string(REGEX MATCH "^([a-z]+):(.*)$" _ "${_pair}")
  set(_variable ${CMAKE_MATCH_2})
  string(REGEX MATCH "(^|\n)${CMAKE_MATCH_1}=([^\n]*)" _ "${_choice}")
  set(${_variable} "${CMAKE_MATCH_2}")
endforeach()
message(STATUS "jax_turboattn builds the ${_why}")
