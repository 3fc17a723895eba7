// y = x W^T for NVFP4 weights and few tokens, on Hopper. See nvfp4_decode.py for what it is given.
//
// Names: a slab is 16 inputs, a fragment 16 outputs of a slab, which is what a warp brings to one wgmma. A block of
// threads computes 256 outputs: the four warps of a warpgroup have 64 outputs each, and warpgroups share the slabs.
// wgmma number j takes the j-th fragment of each warp's 64 outputs from registers and the tokens from shared memory.
// Blocks that share 256 outputs, and split the inputs, are one cluster, which adds its sums up in shared memory.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FUNCTION static __device__ __forceinline__

// ---- instructions --------------------------------------------------------------------------------------------------

FUNCTION u32 multiply_pair(u32 a, u32 b) {  // bf16 x 2; subnormals are kept
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

FUNCTION void copy_async(u32 to, const void *from) {  // 16 bytes, to shared memory
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

FUNCTION float4 load_from_cluster(u32 address, u32 rank) {  // of the same address in the block of that rank
  u32 there;
  float4 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "r"(there)
               : "memory");
  return r;
}

// The compiler must neither move what an unfinished wgmma reads or writes nor compute an address anew in the loop.
FUNCTION void keep(u32 &value) { asm volatile("" : "+r"(value)); }

FUNCTION void keep(u32 (&fragments)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm volatile("" : "+r"(fragments[i][0]), "+r"(fragments[i][1]), "+r"(fragments[i][2]), "+r"(fragments[i][3]));
}

template <int SIZE>
FUNCTION void keep(float (&sums)[4][SIZE]) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < SIZE; j++) asm volatile("" : "+f"(sums[i][j]));
}

#define FOUR(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EIGHT(c, i) FOUR(c, i), FOUR(c, i + 4)

// c [64 outputs, tokens] += a (registers) times x (shared memory, inputs contiguous, swizzled by 128 bytes)
FUNCTION void wgmma(float (&c)[4], const u32 (&a)[4], u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
      : FOUR(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

FUNCTION void wgmma(float (&c)[8], const u32 (&a)[4], u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
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
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : EIGHT(c, 0), EIGHT(c, 8), EIGHT(c, 16), EIGHT(c, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

// ---- NVFP4 ---------------------------------------------------------------------------------------------------------

// A lane's eight weights of a fragment, times 2^-14: rows g and g + 8 of it have the scales of ``row`` and ``row_8``.
// A product moves a nibble's sign to bit 15 and its exponent and mantissa to bits 8 to 6 of a bf16; the moved bits do
// not overlap, so nothing carries. These are the values times 2^-126, subnormal ones too, and the scale does the rest.
FUNCTION void dequantize(u32 (&fragment)[4], u32 word, u32 row, u32 row_8) {
  const u32 kept = 0x81C081C0u, high = word >> 8;
  fragment[0] = multiply_pair(((word & 0x000F000Fu) * 0x1040u) & kept, row);
  fragment[2] = multiply_pair(((word & 0x00F000F0u) * 0x0104u) & kept, row);
  fragment[1] = multiply_pair(((high & 0x000F000Fu) * 0x1040u) & kept, row_8);
  fragment[3] = multiply_pair(((high & 0x00F000F0u) * 0x0104u) & kept, row_8);
}

constexpr float TO_VALUE = 16384.f;  // 2^14

// Four e4m3 without sign to bf16, times 2^112: bytes 0 and 2 to ``even``, 1 and 3 to ``odd``. Exact, as all values are
// multiples of 2^-9 below 2^9; 2^232 is no bf16, so it is multiplied by twice.
FUNCTION void scales_to_bf16(u32 bytes, u32 &even, u32 &odd) {
  const u32 two_127 = 0x7F007F00u, two_105 = 0x74007400u;
  even = multiply_pair(multiply_pair((bytes << 4) & 0x07F007F0u, two_127), two_105);
  odd = multiply_pair(multiply_pair((bytes >> 4) & 0x07F007F0u, two_127), two_105);
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// Shared memory: STAGES times [x: tiles of 64 inputs, [TOKENS][128 bytes]; of each warp: SLABS x 512 bytes of weights
// and 64 of scales], then of each warp SLABS x 128 bytes of bf16 scales. Sums take the place of all at the end.
template <int TOKENS, int GROUPS, int SLABS, int STAGES>
FUNCTION void nvfp4_decode(const u16 *x, const uint4 *weight, const uint4 *scale, const float *global_scale,
                           const u16 *bias, u16 *y, int tokens, int N, int K, int splits) {
  extern __shared__ __align__(1024) uint4 shared[];
  constexpr int WARPS = GROUPS * 4, THREADS = WARPS * 32, STAGE_SLABS = SLABS * GROUPS;
  constexpr int TILE = TOKENS * 128, X_BYTES = STAGE_SLABS / 4 * TILE, WARP_BYTES = SLABS * 576;
  constexpr int STAGE = X_BYTES + WARPS * WARP_BYTES;
  static_assert((SLABS == 4 || SLABS == 8) && STAGES >= 2 && STAGE % 1024 == 0, "");

  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xFFFFFFFFu, thread >> 5, 0), group = warp / 4;
  const int slabs = K >> 4, stages = (slabs + STAGE_SLABS - 1) / STAGE_SLABS;
  const int first = (int)((long long)stages * blockIdx.y / splits);
  const int last = (int)((long long)stages * (blockIdx.y + 1) / splits);
  const int columns = N >> 6, column = blockIdx.x * 4 + warp % 4;  // of 64 outputs
  const u32 memory = (u32)__cvta_generic_to_shared(shared);

  float sums[4][TOKENS / 2];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < TOKENS / 2; j++) sums[i][j] = 0.f;

  // x: a thread copies 16 bytes of rows ``row``, ``row + ROWS``, ...; chunks of a row are swizzled as wgmma reads them
  constexpr int CHUNKS = STAGE_SLABS * 2, ROWS = THREADS / CHUNKS, COPIES = (TOKENS + ROWS - 1) / ROWS;
  static_assert(THREADS % CHUNKS == 0 && ROWS % 8 == 0, "");
  const int row = thread / CHUNKS, chunk = thread % CHUNKS;
  u32 x_to = memory + (chunk >> 3) * TILE + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  const char *x_from = (const char *)(x + (size_t)row * K + ((size_t)first * STAGE_SLABS * 16 + chunk * 8));
  const u32 x_rows = (u32)ROWS * K * 2;

  // weights: a warp has slabs group * SLABS and those after it of each stage; a lane copies what it reads itself.
  // Addresses are odd multiples of half a slab from ``weight_from``, one instruction each.
  const u32 half_slab = (u32)columns * 256;
  const size_t slab = (size_t)first * STAGE_SLABS + group * SLABS;
  const char *weight_from = (const char *)(weight + (slab * columns + column) * 32 + lane) - (size_t)3 * half_slab;
  const char *scale_from = (const char *)(scale + ((slab + (lane >> 2)) * columns + column) * 4 + (lane & 3));
  u32 weight_at = memory + X_BYTES + warp * WARP_BYTES + lane * 16;
  u32 scale_at = memory + X_BYTES + warp * WARP_BYTES + SLABS * 512 + lane * 8;  // as it is read
  u32 bf16_to = memory + STAGES * STAGE + warp * SLABS * 128 + lane * 16;
  u32 bf16_from = memory + STAGES * STAGE + warp * SLABS * 128 + (lane >> 2) * 16;
  keep(x_to), keep(weight_at), keep(scale_at), keep(bf16_to), keep(bf16_from);

#pragma unroll
  for (int i = 0; i < COPIES; i++)  // rows past the last token are zero in all stages, for good
    if (row + i * ROWS >= tokens && row + i * ROWS < TOKENS)
      for (int stage = 0; stage < STAGES; stage++)
        *(uint4 *)((char *)shared + (x_to - memory) + stage * STAGE + i * ROWS * 128) = make_uint4(0, 0, 0, 0);
  make_visible_to_wgmma();

  auto copy_stage = [&](int stage, u32 base) {  // to the slot at ``base``; the pointers stand there, and advance
    if (stage < last) {
      if (STAGE_SLABS <= 8 || (stage + 1) * STAGE_SLABS <= slabs) {  // K is a multiple of 8 slabs
#pragma unroll
        for (int i = 0; i < COPIES; i++)
          if (row + i * ROWS < tokens)
            copy_async(x_to + base + i * ROWS * 128, i ? advance(x_from, i, x_rows) : x_from);
#pragma unroll
        for (int i = 0; i < SLABS; i++)
          copy_async(weight_at + base + i * 512, advance(weight_from, 3 + 2 * i, half_slab));
        if (SLABS == 8 || lane < 4 * SLABS) copy_async(weight_at + base + SLABS * 512, scale_from);
      } else {  // past the end of K x is zero, and the weights are what was there: any bits are a finite number
        const int left = slabs - stage * STAGE_SLABS;
        const bool inside = chunk < left * 2;
#pragma unroll
        for (int i = 0; i < COPIES; i++)
          if (row + i * ROWS < tokens)
            copy_async_or_zero(x_to + base + i * ROWS * 128, inside ? advance(x_from, i, x_rows) : (const char *)x,
                               inside);
#pragma unroll
        for (int i = 0; i < SLABS; i++)
          if (group * SLABS + i < left)
            copy_async(weight_at + base + i * 512, advance(weight_from, 3 + 2 * i, half_slab));
        if ((SLABS == 8 || lane < 4 * SLABS) && group * SLABS + (lane >> 2) < left)
          copy_async(weight_at + base + SLABS * 512, scale_from);
      }
      x_from += STAGE_SLABS * 32;
      weight_from = advance(weight_from, 2 * STAGE_SLABS, half_slab);
      scale_from = advance(scale_from, STAGE_SLABS, (u32)columns * 64);
    }
    end_copies();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) copy_stage(first + i, i * STAGE);

  // wgmma's description of x: its address, 1024 bytes from 8 tokens to the next 8, swizzled by 128 bytes
  const u32 x_low = (((memory + group * (SLABS / 4) * TILE) & 0x3FFFFu) >> 4) | (1u << 16);
  const u32 x_high = (1024u >> 4) | (1u << 30);
  u32 fragments[2][4][4];  // of two slabs: one is dequantised while the other is multiplied
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 16; j++) fragments[i][j >> 2][j & 3] = 0;
  u32 base = 0, before = (STAGES - 1) * STAGE;
#pragma unroll 1
  for (int stage = first; stage < last; stage++) {
    wait_for_copies<STAGES - 2>();
    make_visible_to_wgmma();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < SLABS / 4; i++) {  // this stage's scales, each by one lane
      const uint2 bytes = load_shared_8(scale_at + base + i * 256);
      uint4 pairs;
      scales_to_bf16(bytes.x, pairs.x, pairs.y);
      scales_to_bf16(bytes.y, pairs.z, pairs.w);
      store_shared_16(bf16_to + i * 512, pairs);
    }
    __syncwarp();
    uint4 next_words = load_shared_16(weight_at + base), next_scales = load_shared_16(bf16_from);
#pragma unroll
    for (int i = 0; i < SLABS; i++) {
      const uint4 words = next_words, pairs = next_scales;
      if (i + 1 < SLABS) {
        next_words = load_shared_16(weight_at + base + (i + 1) * 512);
        next_scales = load_shared_16(bf16_from + (i + 1) * 128);
      }
      u32(&fragment)[4][4] = fragments[i & 1];
      dequantize(fragment[0], words.x, low_twice(pairs.x), low_twice(pairs.y));
      dequantize(fragment[1], words.y, high_twice(pairs.x), high_twice(pairs.y));
      dequantize(fragment[2], words.z, low_twice(pairs.z), low_twice(pairs.w));
      dequantize(fragment[3], words.w, high_twice(pairs.z), high_twice(pairs.w));
      if (i == 0) {  // all warps are done with the stage before, and this one's x is there
        wait_for_wgmmas<0>();
        keep(fragments[1]);
        __syncthreads();
        copy_stage(stage + STAGES - 1, before);
        before = base;
      }
      keep(fragment);
      begin_wgmmas();
      const u64 here = ((u64)x_high << 32) | (x_low + (base >> 4) + (i >> 2) * (TILE >> 4) + (i & 3) * 2);
#pragma unroll
      for (int j = 0; j < 4; j++) wgmma(sums[j], fragment[j], here);
      end_wgmmas();
      if (i) {
        wait_for_wgmmas<1>();
        keep(fragments[(i + 1) & 1]);
      }
    }
    base = base == (STAGES - 1) * STAGE ? 0 : base + STAGE;
  }
  wait_for_wgmmas<0>();
  keep(fragments[0]), keep(fragments[1]), keep(sums);
  wait_for_copies<0>();
  __syncthreads();

  // [TOKENS][260] sums: of the warpgroups one after another, then of the cluster's blocks in their order
  constexpr int PITCH = 260;
  float *block_sums = (float *)shared;
  for (int turn = 0; turn < GROUPS; turn++) {
    if (group == turn) {
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
          const int output = warp % 4 * 64 + j * 16 + (lane >> 2) + (i >> 1 & 1) * 8;
          const int token = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
          float *sum = block_sums + token * PITCH + output;
          *sum = turn ? *sum + sums[j][i] : sums[j][i];
        }
    }
    __syncthreads();
  }
  if (splits > 1) synchronize_cluster();
  const float factor = TO_VALUE * global_scale[0];
  for (int part = blockIdx.y * THREADS + thread; part < tokens * 64; part += splits * THREADS) {
    const int token = part / 64, output = part % 64 * 4;
    const u32 address = memory + (token * PITCH + output) * 4;
    float4 sum = load_from_cluster(address, 0);
#pragma unroll 4
    for (int rank = 1; rank < splits; rank++) {
      const float4 more = load_from_cluster(address, rank);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
    const int n = blockIdx.x * 256 + output;
    if (bias) {  // Humming's order: of 32 outputs those whose remainder by 8 is 0 or 1, then 2 or 3, ...
      const u16 *from = bias + (n & ~31) + ((n >> 1) & 2) * 8 + ((n >> 3) & 3) * 2;
      sum.x += from_bf16(from[0]), sum.y += from_bf16(from[1]);
      sum.z += from_bf16(from[8]), sum.w += from_bf16(from[9]);
    }
    const uint2 four = make_uint2((u32)to_bf16(sum.x) | ((u32)to_bf16(sum.y) << 16),
                                  (u32)to_bf16(sum.z) | ((u32)to_bf16(sum.w) << 16));
    *(uint2 *)(y + (size_t)token * N + n) = four;
  }
  if (splits > 1) synchronize_cluster();  // others may still read this block's sums
}
