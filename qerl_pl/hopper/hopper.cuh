// Hopper's instructions in CUDA C++: shared and cluster memory, asynchronous copies, wgmma, dependent launches.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FUNCTION static __device__ __forceinline__

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

FUNCTION uint4 load_matrices(u32 from) {  // four 8 x 8 matrices of 16 bits; each lane has the address of a row of one
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
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

// Waits for all thread blocks of the cluster without ordering memory accesses, which keeps a thread block alive while
// others read its shared memory.
FUNCTION void synchronize_cluster_without_memory() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
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

FUNCTION unsigned load_acquire(const unsigned *from) {
  unsigned r;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(r) : "l"(from) : "memory");
  return r;
}

FUNCTION void add_release(unsigned *to, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

FUNCTION uint4 load_16_or_zero(const u16 *from, bool load) {
  uint4 r = make_uint4(0, 0, 0, 0);
  if (load)
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from));
  return r;
}

FUNCTION void prefetch_to_l2(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

FUNCTION void prefetch_to_l2(const void *from, u32 bytes) {  // address and size: multiples of 16
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

FUNCTION void mma(float &c0, float &c1, float &c2, float &c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

FUNCTION void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // c [16, 8] += a [16, 16] times b [16, 8]
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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

FUNCTION void wgmma(float (&c)[128], const u32 (&a)[4], u64 x) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
      "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
      "%57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, "
      "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "
      "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "
      "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
      : EIGHT(c, 0), EIGHT(c, 8), EIGHT(c, 16), EIGHT(c, 24), EIGHT(c, 32), EIGHT(c, 40), EIGHT(c, 48), EIGHT(c, 56),
        EIGHT(c, 64), EIGHT(c, 72), EIGHT(c, 80), EIGHT(c, 88), EIGHT(c, 96), EIGHT(c, 104), EIGHT(c, 112),
        EIGHT(c, 120)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}
