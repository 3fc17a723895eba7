// Shared by the NVFP4 kernels for Hopper: PTX instructions, dequantisation, the fused adapter, storing the sums.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FUNCTION static __device__ __forceinline__

// ---- instructions --------------------------------------------------------------------------------------------------

FUNCTION u32 multiply_pair(u32 a, u32 b) {  // two bf16 products; subnormals are kept
  u32 result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

FUNCTION u32 low_twice(u32 pair) {
  u32 result;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(result) : "r"(pair));
  return result;
}

FUNCTION u32 high_twice(u32 pair) {
  u32 result;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(result) : "r"(pair));
  return result;
}

FUNCTION u16 to_bf16(float value) {
  u16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}

FUNCTION float from_bf16(u16 value) { return __uint_as_float((u32)value << 16); }

FUNCTION void copy_async(u32 to, const void *from) {  // 16 bytes, global to shared memory
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

FUNCTION void copy_async_or_zero(u32 to, const void *from, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copy ? 16 : 0));
}

FUNCTION void end_copies() { asm volatile("cp.async.commit_group;"); }

template <int LEFT>
FUNCTION void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

FUNCTION const char *advance(const void *pointer, u32 steps, u32 bytes) {
  u64 result;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(result) : "r"(steps), "r"(bytes), "l"((u64)pointer));
  return (const char *)result;
}

FUNCTION uint4 load_shared_16(u32 from) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(from)
               : "memory");
  return r;
}

FUNCTION uint2 load_shared_8(u32 from) {
  uint2 r;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(from) : "memory");
  return r;
}

FUNCTION u32 load_shared_4(u32 from) {
  u32 r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(from) : "memory");
  return r;
}

FUNCTION u32 load_shared_2(u32 from) {
  u16 r;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(from) : "memory");
  return r;
}

FUNCTION void store_shared_8(u32 to, u32 x, u32 y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(x), "r"(y) : "memory");
}

FUNCTION void store_shared_16(u32 to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

FUNCTION void make_visible_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

FUNCTION void begin_wgmmas() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

FUNCTION void end_wgmmas() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
FUNCTION void wait_for_wgmmas() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

FUNCTION void synchronize_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

FUNCTION float4 load_from_cluster(u32 address, u32 rank) {  // from the same address in the thread block of that rank
  u32 there;
  float4 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "r"(there)
               : "memory");
  return r;
}

// Under programmatic dependent launch, nothing that the previous kernel writes may be read before this call.
FUNCTION void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

FUNCTION void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

FUNCTION uint4 load_16_or_zero(const u16 *from, bool load) {
  uint4 r = make_uint4(0, 0, 0, 0);
  if (load)
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
  return r;
}

FUNCTION void prefetch_to_l2(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

FUNCTION void mma(float &c0, float &c1, float &c2, float &c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c [16 rows, 8 columns] += a product over 32 inputs; a lane holds 8 contiguous inputs of rows g and g + 8 and of
// column g, where g = lane / 4.
FUNCTION void multiply_chunk(float *c, uint4 row, uint4 row_8, uint4 column) {
  mma(c[0], c[1], c[2], c[3], row.x, row_8.x, row.y, row_8.y, column.x, column.y);
  mma(c[0], c[1], c[2], c[3], row.z, row_8.z, row.w, row_8.w, column.z, column.w);
}

// Stops the compiler from moving registers that an unfinished wgmma reads or writes, and from recomputing an address.
FUNCTION void keep(u32 &value) { asm volatile("" : "+r"(value)); }

FUNCTION void keep(u32 (&fragment)[4]) {
  asm volatile("" : "+r"(fragment[0]), "+r"(fragment[1]), "+r"(fragment[2]), "+r"(fragment[3]));
}

template <int COUNT>
FUNCTION void keep(u32 (&fragments)[COUNT][4]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) keep(fragments[i]);
}

template <int SIZE>
FUNCTION void keep(float (&sums)[SIZE]) {
#pragma unroll
  for (int i = 0; i < SIZE; i++) asm volatile("" : "+f"(sums[i]));
}

#define FOUR(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EIGHT(c, i) FOUR(c, i), FOUR(c, i + 4)

// c [64 outputs, tokens] += a (registers) times x (shared memory, inputs contiguous, 128-byte swizzle)
FUNCTION void wgmma(float (&c)[4], const u32 (&a)[4], u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
      : FOUR(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

FUNCTION void wgmma(float (&c)[8], const u32 (&a)[4], u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, "
      "1, 1, 1, 0;"
      : EIGHT(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

FUNCTION void wgmma(float (&c)[16], const u32 (&a)[4], u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : EIGHT(c, 0), EIGHT(c, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

FUNCTION void wgmma(float (&c)[32], const u32 (&a)[4], u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, "
      "%35}, %36, 1, 1, 1, 0;"
      : EIGHT(c, 0), EIGHT(c, 8), EIGHT(c, 16), EIGHT(c, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

FUNCTION void wgmma(float (&c)[48], const u32 (&a)[4], u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
      "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, {%48, %49, %50, %51}, %52, 1, 1, 1, 0;"
      : EIGHT(c, 0), EIGHT(c, 8), EIGHT(c, 16), EIGHT(c, 24), EIGHT(c, 32), EIGHT(c, 40)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

FUNCTION void wgmma(float (&c)[64], const u32 (&a)[4], u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
      "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
      "%57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
      : EIGHT(c, 0), EIGHT(c, 8), EIGHT(c, 16), EIGHT(c, 24), EIGHT(c, 32), EIGHT(c, 40), EIGHT(c, 48), EIGHT(c, 56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

// ---- NVFP4 ---------------------------------------------------------------------------------------------------------

// Converts a lane's eight weights of a fragment to bf16 and multiplies them by their scales; the result is 2^-14 times
// the weight. ``row`` and ``row_8`` are the scales of rows g and g + 8, times 2^112. An integer product moves a
// nibble's sign to bit 15 and its exponent and mantissa to bits 8 to 6 of a bf16, which gives the nibble's value times
// 2^-126, subnormals included. The moved bits do not overlap, so the product has no carries.
FUNCTION void dequantize(u32 (&fragment)[4], u32 word, u32 row, u32 row_8) {
  const u32 kept = 0x81C081C0u, high = word >> 8;
  fragment[0] = multiply_pair(((word & 0x000F000Fu) * 0x1040u) & kept, row);
  fragment[2] = multiply_pair(((word & 0x00F000F0u) * 0x0104u) & kept, row);
  fragment[1] = multiply_pair(((high & 0x000F000Fu) * 0x1040u) & kept, row_8);
  fragment[3] = multiply_pair(((high & 0x00F000F0u) * 0x0104u) & kept, row_8);
}

constexpr float TO_VALUE = 16384.f;  // 2^14

// Converts four non-negative e4m3 values to bf16, times 2^112: bytes 0 and 2 to ``even``, 1 and 3 to ``odd``. This is
// exact, because all e4m3 values are multiples of 2^-9 below 2^9. The moved bits are the value times 2^-120; the factor
// 2^232 that is left exceeds bf16's range, so it is applied in two products.
FUNCTION void scales_to_bf16(u32 bytes, u32 &even, u32 &odd) {
  const u32 two_127 = 0x7F007F00u, two_105 = 0x74007400u;
  even = multiply_pair(multiply_pair((bytes << 4) & 0x07F007F0u, two_127), two_105);
  odd = multiply_pair(multiply_pair((bytes >> 4) & 0x07F007F0u, two_127), two_105);
}

// ---- an adapter ----------------------------------------------------------------------------------------------------

struct Adapter {  // y += h B^T; lora_hopper.py computes h
  const u16 *hidden;  // [slices, tokens, rank]; null without an adapter
  const u16 *b0, *b1, *b2;  // [outputs of a slice, rank]
  int first1, first2;  // first output of slices 2 and 3; N or more if there is none
  int rank;
};

FUNCTION int slice_of(const Adapter &adapter, int n) { return (n >= adapter.first1) + (n >= adapter.first2); }

FUNCTION const u16 *row_of_b(const Adapter &adapter, int n) {
  const int slice = slice_of(adapter, n);
  const u16 *b = slice == 0 ? adapter.b0 : slice == 1 ? adapter.b1 : adapter.b2;
  return b + (size_t)(n - (slice == 0 ? 0 : slice == 1 ? adapter.first1 : adapter.first2)) * adapter.rank;
}

// Fetches the rows of B for outputs n to n + OUTPUTS to L2 while the base GEMM is computed.
template <int OUTPUTS, int THREADS>
FUNCTION void prefetch_b(const Adapter &adapter, int n, int N) {
  for (int i = threadIdx.x; i < OUTPUTS && n + i < N; i += THREADS) prefetch_to_l2(row_of_b(adapter, n + i));
}

// Adds h B^T to a warp's sums of COUNT x 16 outputs and TILES x 8 tokens; the outputs start at n and lie in one slice.
// Of the thread blocks of a cluster, which hold partial sums of the same outputs, one adds the product for each 16
// outputs. B is loaded before h is complete, then h in groups of IN_FLIGHT tiles.
template <int COUNT, int TILES, int IN_FLIGHT>
FUNCTION void add_adapter(float *sums, const Adapter &adapter, int n, int first_token, int tokens, int splits) {
  static_assert(TILES % IN_FLIGHT == 0, "");
  const int lane = threadIdx.x & 31, g = lane >> 2, rank = adapter.rank;
  if (blockIdx.y >= COUNT) return;
  const u16 *row = row_of_b(adapter, n + g);
  const u16 *hidden = adapter.hidden + ((size_t)slice_of(adapter, n) * tokens + first_token + g) * rank;
#pragma unroll 1
  for (int r = (lane & 3) * 8; r < (rank + 31) / 32 * 32; r += 32) {
    uint4 rows[COUNT][2];
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        rows[i][j] = load_16_or_zero(row + (i * 16 + j * 8) * rank + r, r < rank && i % splits == blockIdx.y);
    wait_for_kernel_before();  // the previous kernel writes h
#pragma unroll
    for (int first = 0; first < TILES; first += IN_FLIGHT) {
      uint4 columns[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; i++)
        columns[i] = load_16_or_zero(hidden + (first + i) * 8 * rank + r,
                                     r < rank && first_token + (first + i) * 8 + g < tokens);
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        if (i % splits == blockIdx.y)
#pragma unroll
          for (int j = 0; j < IN_FLIGHT; j++)
            multiply_chunk(sums + (i * TILES + first + j) * 4, rows[i][0], rows[i][1], columns[j]);
    }
  }
}

// ---- sums to y ----------------------------------------------------------------------------------------------------

FUNCTION float4 sum_of_cluster(u32 address, int blocks) {  // over all thread blocks, in the order of their ranks
  float4 sum = load_from_cluster(address, 0);
#pragma unroll 4
  for (int rank = 1; rank < blocks; rank++) {
    const float4 more = load_from_cluster(address, rank);
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  return sum;
}

FUNCTION uint2 four_to_bf16(float4 v) {
  return make_uint2((u32)to_bf16(v.x) | ((u32)to_bf16(v.y) << 16), (u32)to_bf16(v.z) | ((u32)to_bf16(v.w) << 16));
}

// Stores four outputs of a token, from n on, to y [tokens, N]; stores nothing if n is past the end.
FUNCTION void store_outputs(u16 *y, const u16 *bias, int token, int n, int N, float4 sum) {
  if (n >= N) return;
  if (bias) {  // Humming's order: of 32 outputs first those with n % 8 in (0, 1), then (2, 3), ...
    const u16 *from = bias + (n & ~31) + ((n >> 1) & 2) * 8 + ((n >> 3) & 3) * 2;
    sum.x += from_bf16(from[0]), sum.y += from_bf16(from[1]);
    sum.z += from_bf16(from[8]), sum.w += from_bf16(from[9]);
  }
  *(uint2 *)(y + (size_t)token * N + n) = four_to_bf16(sum);
}

// Stores a thread block's share of its cluster's sums: FOURS groups of four outputs per token, from output ``n`` on.
template <int FOURS, int THREADS>
FUNCTION void store_sums_of_cluster(u32 sums, u16 *y, const u16 *bias, int tokens, int n, int N, int splits) {
  for (int part = blockIdx.y * THREADS + threadIdx.x; part < tokens * FOURS; part += splits * THREADS) {
    const int token = part / FOURS, output = part % FOURS * 4;
    store_outputs(y, bias, token, n + output, N, sum_of_cluster(sums + (token * (FOURS * 4 + 4) + output) * 4, splits));
  }
}
