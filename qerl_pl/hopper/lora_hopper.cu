// h = x A^T for the slices of one LoRA adapter on Hopper, as a kernel of its own. lora_hopper.py documents the
// arguments, lora.cuh how h is computed. Each slice is computed by eight warps of a thread block, and tiles of tokens
// one after another.
template <int TOKENS, int SLICES, int IN_FLIGHT>
FUNCTION void lora_shrink(const u16 *x, const u16 *a0, const u16 *a1, const u16 *a2, const long long *indices,
                          u16 *hidden, int tokens, int K, int rank, int splits) {
  constexpr int WARPS = 8, RANKS = 32, SUMS_IN_FLIGHT = SLICES == 3 ? 2 : 4;
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0), slice = warp / WARPS;
  const int first_rank = blockIdx.x * RANKS;
  const u16 *a = slice == 0 ? a0 : slice == 1 ? a1 : a2;
  if (blockIdx.z == 0)  // while the previous kernel still runs
    prefetch_a(a, K, first_rank, rank, blockIdx.y * WARPS * 32 + threadIdx.x % (WARPS * 32), splits * WARPS * 32);
  wait_for_kernel_before();  // the previous kernel may have written x
  let_next_kernel_start();
  for (int first_token = blockIdx.z * TOKENS; first_token < tokens; first_token += gridDim.z * TOKENS) {
    shrink_tile<TOKENS, SLICES, WARPS, IN_FLIGHT, SUMS_IN_FLIGHT>(x, a, indices, hidden, tokens, K, rank, splits,
                                                                  first_token, first_rank);
    synchronize_cluster_without_memory();
  }
}
