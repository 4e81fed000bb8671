// How many cycles a scheduler of an SM spends on an MMA, if other instructions run beside it. benchmarks/gpu_mma_rate.py compiles and runs
// it. Every thread runs `mma.sync` m16n8k16 on several sums in turn, and beside each MMA some LOP3 that change registers of its A
// operand, and some instructions of another kind on registers of their own. One block per SM; prints rows of CSV.
#include <cstdint>
#include <cstdio>

constexpr int kBlocks = 132, kMostWarps = 12, kRounds = 200, kUnrolled = 32;  // kBlocks: one for each SM of an H100 or H200

// An instruction that changes one of a thread's registers.
#define INSTRUCTION(Name, text, Register, letter)                                                              \
  struct Name {                                                                                                \
    static constexpr const char* kName = #Name;                                                                \
    using Type = Register;                                                                                     \
    __device__ static void run(Register& x, uint32_t word) { asm volatile(text : "+" letter(x) : "r"(word)); } \
  }
INSTRUCTION(NONE, "", uint32_t, "r");
INSTRUCTION(FFMA, "{.reg .f32 y; mov.b32 y, %1; fma.rn.f32 %0, %0, y, y;}", float, "f");
INSTRUCTION(FADD, "{.reg .f32 y; mov.b32 y, %1; add.rn.f32 %0, %0, y;}", float, "f");
INSTRUCTION(FMUL, "{.reg .f32 y; mov.b32 y, %1; mul.rn.f32 %0, %0, y;}", float, "f");
INSTRUCTION(FMNMX, "{.reg .f32 y; mov.b32 y, %1; max.f32 %0, %0, y;}", float, "f");
INSTRUCTION(HFMA2, "fma.rn.f16x2 %0, %0, %1, %1;", uint32_t, "r");
INSTRUCTION(HADD2, "add.rn.f16x2 %0, %0, %1;", uint32_t, "r");
INSTRUCTION(HMUL2, "mul.rn.f16x2 %0, %0, %1;", uint32_t, "r");
INSTRUCTION(HMNMX2, "max.NaN.f16x2 %0, %0, %1;", uint32_t, "r");
INSTRUCTION(HADD2_F32, "{.reg .b16 l, h; .reg .f32 y; mov.b32 {l, h}, %0; cvt.f32.f16 y, h; mov.b32 %0, y;}", uint32_t, "r");
INSTRUCTION(F2FP, "{.reg .f32 y; .reg .b32 z; mov.b32 y, %1; cvt.rn.f16x2.f32 z, y, %0; mov.b32 %0, z;}", float, "f");
INSTRUCTION(LOP3, "lop3.b32 %0, %0, 0x000f000f, %1, 0x6a;", uint32_t, "r");
INSTRUCTION(PRMT, "prmt.b32 %0, %0, %1, 0x4341;", uint32_t, "r");
INSTRUCTION(IMAD, "mad.lo.u32 %0, %0, %1, %1;", uint32_t, "r");
INSTRUCTION(SHF, "shf.r.wrap.b32 %0, %0, %1, 13;", uint32_t, "r");
INSTRUCTION(MUFU_EX2, "ex2.approx.ftz.f32 %0, %0;", float, "f");

template <int kSums, int kLogic, class Other, int kOthers>
__global__ void __launch_bounds__(kMostWarps * 32) multiply(uint32_t* sums, long long* cycles) {
  constexpr int kRegisters = 8;
  float sum[kSums][4] = {};
  typename Other::Type others[kRegisters];
  uint32_t operands[4][4];  // of four MMAs in turn, so that none waits until the one before has read its own
  for (int i = 0; i < 16; ++i) operands[i / 4][i % 4] = threadIdx.x * 77 + i;
  for (int i = 0; i < kRegisters; ++i) others[i] = static_cast<typename Other::Type>(threadIdx.x + i);
  const uint32_t b = threadIdx.x & 0x000f000fu, word = threadIdx.x * 77;
  __syncthreads();
  const long long start = clock64();
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int m = 0; m < kUnrolled; ++m) {
#pragma unroll
      for (int i = 0; i < kLogic; ++i) LOP3::run(operands[m % 4][i], word);
#pragma unroll
      for (int i = 0; i < kOthers; ++i) Other::run(others[(m * kOthers + i) % kRegisters], word);
      float(&c)[4] = sum[m % kSums];
      const uint32_t(&a)[4] = operands[m % 4];
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%8},{%0,%1,%2,%3};"
                   : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
    }
  }
  const long long end = clock64();
  float total = 0.f;
  for (int i = 0; i < kSums; ++i)
    for (float value : sum[i]) total += value;
  for (int i = 0; i < kRegisters; ++i) total += static_cast<float>(others[i]);
  sums[blockIdx.x * blockDim.x + threadIdx.x] = __float_as_uint(total);
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - start;
}

uint32_t* sums;
long long* cycles;

template <int kSums, int kLogic, class Other = NONE, int kOthers = 0>
void measure() {
  for (int warps = 1; warps <= kMostWarps / 4; ++warps) {  // of a scheduler
    for (int run = 0; run < 2; ++run) multiply<kSums, kLogic, Other, kOthers><<<kBlocks, warps * 128>>>(sums, cycles);
    long long taken = 0;
    cudaMemcpy(&taken, cycles, sizeof taken, cudaMemcpyDeviceToHost);
    const double each = static_cast<double>(taken) / (kRounds * kUnrolled * warps);
    printf("%d,%d,%s,%d,%d,%.2f\n", kSums, kLogic, Other::kName, kOthers, warps, each);
  }
}

// Alone with the MMA, and beside two LOP3 for each, which is about what expanding codes takes.
template <class... Others>
void measure_all() {
  (measure<16, 0, Others, 2>(), ...);
  (measure<16, 2, Others, 1>(), ...);
  (measure<16, 2, Others, 2>(), ...);
}

int main() {
  if (cudaMalloc(&sums, kBlocks * kMostWarps * 32 * sizeof *sums) != cudaSuccess) return 1;
  if (cudaMalloc(&cycles, kBlocks * sizeof *cycles) != cudaSuccess) return 1;
  printf("sums,lop3,other,others,warps,cycles_per_mma\n");
  measure<16, 0>(), measure<4, 0>(), measure<2, 0>(), measure<1, 0>(), measure<16, 2>(), measure<16, 3>(), measure<16, 4>();
  measure_all<FFMA, FADD, FMUL, FMNMX, HFMA2, HADD2, HMUL2, HMNMX2, HADD2_F32, F2FP, LOP3, PRMT, IMAD, SHF, MUFU_EX2>();
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
