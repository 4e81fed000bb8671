// Stands for the header of the same name: cuda_emulator.hpp declares the functions of the runtime that the kernels use.
#pragma once
