//! Kernel parameters near the most that the driver takes, by every way to give and to ask for them.

use super::capture::{instantiate, stream};
use super::*;

const PTX: &str = concat!(include_str!("../../../fixtures/large_params.ptx"), "\0");

/// Bytes of the kernel's one parameter: the address of a word to add to, and numbers.
const LEN: usize = 32_760;
/// The numbers that the kernel reads, by their place in words.
const READ: [usize; 4] = [2, 1024, 2048, 8189];

/// A parameter of [`LEN`] bytes.
struct Large(Vec<u32>);

impl Large {
    fn new(out: CUdeviceptr, seed: u32) -> Large {
        let mut words: Vec<u32> = (0..LEN as u32 / 4).map(|at| at * 7 + seed).collect();
        words[0] = out as u32;
        words[1] = (out >> 32) as u32;
        Large(words)
    }
    /// What the kernel adds.
    fn sum(&self) -> i32 {
        let weighted = READ
            .iter()
            .zip(1..)
            .map(|(at, weight)| self.0[*at] * weight);
        weighted.sum::<u32>() as i32
    }
    /// Whether it is what a pointer of a node's parameters leads to.
    fn is_at(&self, node: &CUDA_KERNEL_NODE_PARAMS) -> bool {
        if node.params == 0 {
            return false;
        }
        // SAFETY: the driver's array of pointers to copies of the parameters, of which the kernel has one.
        let kept =
            unsafe { std::slice::from_raw_parts(*(node.params as *const *const u32), LEN / 4) };
        kept == self.0
    }
}

pub fn large_parameters(_: &Setup) {
    let out = alloc(4096);
    let none = null_mut::<c_void>();
    let mut library = CUlibrary::NULL;
    must!(
        cuLibraryLoadData,
        &mut library,
        PTX.as_ptr(),
        none,
        none,
        0u32,
        none,
        none,
        0u32
    );
    let mut kernel = CUkernel::NULL;
    must!(
        cuLibraryGetKernel,
        &mut kernel,
        library,
        c"add_words".as_ptr()
    );
    let mut function = CUfunction::NULL;
    must!(cuKernelGetFunction, &mut function, kernel);
    let (mut offset, mut size) = (9usize, 9usize);
    let info = cu!(cuKernelGetParamInfo, kernel, 0usize, &mut offset, &mut size);
    say!("the parameter", "{info} {offset} {size}");
    let stream = stream(0);
    let (first, second) = (Large::new(out, 3), Large::new(out, 1000));
    let ran = |expected: i32| {
        must!(cuStreamSynchronize, stream);
        let is = read_i32(out, 1)[0] == expected;
        must!(cuMemsetD32_v2, out, 0u32, 1usize);
        must!(cuStreamSynchronize, CUstream::NULL);
        is
    };
    ran(0);

    let launch = |of: u64, large: &Large, attributes: &[CUlaunchAttribute]| {
        let mut pointers = [large.0.as_ptr() as *mut c_void];
        let config = CUlaunchConfig {
            grid: [1, 1, 1],
            block: [1, 1, 1],
            shared_mem_bytes: 0,
            stream,
            attrs: attributes.as_ptr(),
            num_attrs: attributes.len() as u32,
        };
        let none = null_mut::<*mut c_void>();
        cu!(
            cuLaunchKernelEx,
            &config,
            CUfunction(of),
            pointers.as_mut_ptr(),
            none
        )
    };
    let mut priority = CUlaunchAttribute {
        id: CU_LAUNCH_ATTRIBUTE_PRIORITY,
        pad: 0,
        value: [0; 64],
    };
    priority.value[..4].copy_from_slice(&(-1i32).to_ne_bytes());
    say!(
        "launch",
        "{} {}",
        launch(function.0, &first, &[]),
        ran(first.sum())
    );
    say!(
        "of the kernel",
        "{} {}",
        launch(kernel.0, &second, &[]),
        ran(second.sum())
    );
    let launched = launch(function.0, &first, &[priority]);
    say!("with an attribute", "{launched} {}", ran(first.sum()));
    let mut size = LEN;
    let mut packed = [1u64, first.0.as_ptr() as u64, 2, &raw mut size as u64, 0];
    let launched = cu!(
        cuLaunchKernel,
        function,
        1u32,
        1u32,
        1u32,
        1u32,
        1u32,
        1u32,
        0u32,
        stream,
        null_mut::<*mut c_void>(),
        packed.as_mut_ptr().cast::<*mut c_void>()
    );
    say!("packed", "{launched} {}", ran(first.sum()));

    // By hand, as the runtime gives it: with the kernel and its function.
    let mut graph = CUgraph::NULL;
    must!(cuGraphCreate, &mut graph, 0u32);
    let mut pointers = [first.0.as_ptr() as u64];
    let mut params = CUDA_KERNEL_NODE_PARAMS {
        function: function.0,
        kernel: kernel.0,
        grid: [1, 1, 1],
        block: [1, 1, 1],
        params: pointers.as_ptr() as u64,
        ..Default::default()
    };
    let mut node = CUgraphNode::NULL;
    let added = cu!(
        cuGraphAddKernelNode_v2,
        &mut node,
        graph,
        null::<CUgraphNode>(),
        0usize,
        &params
    );
    say!("a node", "{added}");
    let find = |node: CUgraphNode, large: &Large| {
        let mut found = CUDA_KERNEL_NODE_PARAMS::default();
        let status = cu!(cuGraphKernelNodeGetParams_v2, node, &mut found);
        let (of_function, of_kernel) = (found.function == function.0, found.kernel == kernel.0);
        format!("{status} {of_function} {of_kernel} {}", large.is_at(&found))
    };
    say!("it is", "{}", find(node, &first));
    let exec = instantiate(graph);
    must!(cuGraphLaunch, exec, stream);
    say!("it runs", "{}", ran(first.sum()));
    pointers[0] = second.0.as_ptr() as u64;
    let set = cu!(cuGraphExecKernelNodeSetParams_v2, exec, node, &params);
    must!(cuGraphLaunch, exec, stream);
    say!("set in the instance", "{set} {}", ran(second.sum()));
    say!("the graph's is", "{}", find(node, &first));
    params.function = 0;
    say!(
        "set",
        "{}",
        cu!(cuGraphKernelNodeSetParams_v2, node, &params)
    );
    say!("it is", "{}", find(node, &second));
    let mut value = priority.value;
    let id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
    let set = cu!(cuGraphKernelNodeSetAttribute, node, id, value.as_mut_ptr());
    value[0] = 0;
    let get = cu!(cuGraphKernelNodeGetAttribute, node, id, value.as_mut_ptr());
    say!("an attribute", "{set} {get} {}", value[0]);
    let mut result = CUgraphExecUpdateResultInfo::default();
    pointers[0] = first.0.as_ptr() as u64;
    value[..4].fill(0);
    must!(cuGraphKernelNodeSetAttribute, node, id, value.as_mut_ptr());
    must!(cuGraphKernelNodeSetParams_v2, node, &params);
    let updated = cu!(cuGraphExecUpdate_v2, exec, graph, &mut result);
    must!(cuGraphLaunch, exec, stream);
    say!("updated", "{updated} {}", ran(first.sum()));
    must!(cuGraphExecDestroy, exec);
    let mut copy = CUgraph::NULL;
    must!(cuGraphClone, &mut copy, graph);
    let exec = instantiate(copy);
    must!(cuGraphLaunch, exec, stream);
    say!("a clone runs", "{}", ran(first.sum()));
    must!(cuGraphExecDestroy, exec);
    must!(cuGraphDestroy, copy);
    must!(cuGraphDestroy, graph);

    // By capture, of the function and of the kernel.
    for (name, of) in [
        ("captured", function.0),
        ("captured of the kernel", kernel.0),
    ] {
        must!(cuStreamBeginCapture_v2, stream, 0u32);
        let launched = launch(of, &second, &[]);
        let mut graph = CUgraph::NULL;
        must!(cuStreamEndCapture, stream, &mut graph);
        let (mut nodes, mut count) = ([CUgraphNode::NULL; 1], 1usize);
        must!(cuGraphGetNodes, graph, nodes.as_mut_ptr(), &mut count);
        say!(name, "{launched} {}", find(nodes[0], &second));
        let exec = instantiate(graph);
        pointers[0] = first.0.as_ptr() as u64;
        let set = cu!(cuGraphExecKernelNodeSetParams_v2, exec, nodes[0], &params);
        must!(cuGraphLaunch, exec, stream);
        say!("set in the instance", "{set} {}", ran(first.sum()));
        must!(cuGraphExecDestroy, exec);
        must!(cuGraphDestroy, graph);
    }
    must!(cuStreamDestroy_v2, stream);
    must!(cuLibraryUnload, library);
    free(out);
}
