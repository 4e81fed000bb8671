// Stands for the header of the same name: cuda_emulator.hpp declares what the kernels take of the runtime.
#pragma once
