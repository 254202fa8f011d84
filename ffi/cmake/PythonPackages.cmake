# Sets TURBOATTN_XLA_INCLUDE (jaxlib's FFI headers) and finds nanobind, both through the building Python.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
    "import importlib.util as u, os; print(os.path.join(os.path.dirname(u.find_spec('jaxlib').origin), 'include'))"
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE TURBOATTN_XLA_INCLUDE COMMAND_ERROR_IS_FATAL ANY)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)
