# Horovod asks nvcc for C++11, which CUDA 13 dropped. Its kernels include no torch header, so C++17, known
# to every CUDA that torch 2.1 or newer is built with, is enough whatever torch needs.
foreach(_standard 11 14)
  set(CMAKE_CUDA${_standard}_STANDARD_COMPILE_OPTION "-std=c++17")
  set(CMAKE_CUDA${_standard}_EXTENSION_COMPILE_OPTION "-std=c++17")
endforeach()
