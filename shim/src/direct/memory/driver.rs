//! The driver's functions that the accounting calls.

use mpsshim_api::cuda::{CUDA_ERROR_NOT_SUPPORTED, CUDA_MEM_ALLOC_NODE_PARAMS, CUdevice, CUresult};

use crate::direct::wrap::Genuine;

macro_rules! functions {
    ($(fn $name:ident = $symbol:ident($($arg:ident: $ty:ty),*);)*) => {
        $(
            #[doc = concat!("`", stringify!($symbol), "`.")]
            pub fn $name($($arg: $ty),*) -> CUresult {
                static GENUINE: Genuine = Genuine::new(stringify!($symbol));
                let Some(address) = GENUINE.address() else {
                    return CUDA_ERROR_NOT_SUPPORTED;
                };
                // SAFETY: the driver's function of this name has this signature.
                let function = unsafe {
                    std::mem::transmute::<*const (), unsafe extern "C" fn($($ty),*) -> CUresult>(address)
                };
                // SAFETY: handles are the program's or the driver's, references are valid for the driver's writes.
                unsafe { function($($arg),*) }
            }
        )*

        #[cfg(test)]
        pub fn signatures() -> Vec<crate::signature::Named> {
            vec![$((stringify!($symbol), crate::signature::signature!($($ty),*))),*]
        }
    };
}

functions! {
    fn current_device = cuCtxGetDevice(device: &mut CUdevice);
    fn current_context = cuCtxGetCurrent(context: &mut u64);
    fn primary_state = cuDevicePrimaryCtxGetState(device: CUdevice, flags: &mut u32, active: &mut i32);
    fn pointer_attribute = cuPointerGetAttribute(ordinal: &mut i32, attribute: u32, address: u64);
    fn stream_device = cuStreamGetDevice(stream: u64, device: &mut CUdevice);
    fn default_pool = cuDeviceGetDefaultMemPool(pool: &mut u64, device: CUdevice);
    fn current_pool = cuDeviceGetMemPool(pool: &mut u64, device: CUdevice);
    fn pool_bytes = cuMemPoolGetAttribute(pool: u64, attribute: u32, bytes: &mut u64);
    fn is_capturing = cuStreamIsCapturing(stream: u64, state: &mut u32);
    fn is_capturing_per_thread = cuStreamIsCapturing_ptsz(stream: u64, state: &mut u32);
    fn nodes = cuGraphGetNodes(graph: u64, nodes: *mut u64, count: &mut usize);
    fn node_type = cuGraphNodeGetType(node: u64, kind: &mut u32);
    fn alloc_node = cuGraphMemAllocNodeGetParams(node: u64, params: &mut CUDA_MEM_ALLOC_NODE_PARAMS);
    fn free_node = cuGraphMemFreeNodeGetParams(node: u64, address: &mut u64);
    fn child_graph = cuGraphChildGraphNodeGetGraph(node: u64, graph: &mut u64);
}
