//! Graphs, their nodes and instances.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::graph::*;
use mpsshim_proto::message::{Object, Op, PARAMS_MAX, Range, Value};
use mpsshim_proto::segment::FLAGS;
use mpsshim_tests::refusals::{Draft, Scene, Table, node};
use zerocopy::IntoBytes;

fn object(object: u64) -> Draft {
    Draft::of(&Object { object })
}

fn pair(first: u64, second: u64) -> Draft {
    Draft::of(&GraphPair { first, second })
}

fn launch(exec: u64, stream: u64) -> Draft {
    Draft::of(&GraphLaunch { exec, stream })
}

fn list(object: u64, what: u32) -> Draft {
    Draft::of(&GraphList {
        object,
        what,
        first: 0,
        most: 1,
        pad: 0,
    })
}

/// Two nodes of a new graph.
fn nodes(s: &mut Scene) -> (u64, u64, u64) {
    let graph = s.make(Kind::Graph);
    let from = node(&mut s.peer, graph);
    (graph, from, node(&mut s.peer, graph))
}

fn dependency(graph: u64, count: u32) -> Draft {
    Draft::of(&GraphDependencies {
        graph,
        count,
        remove: 0,
    })
}

/// A node that is added to a graph, without what it does.
fn add(graph: u64, kind: u32) -> Draft {
    Draft::of(&GraphNode {
        object: graph,
        kind,
        ..GraphNode::default()
    })
}

/// The same to a new graph.
fn add_new(s: &mut Scene, kind: u32) -> Draft {
    add(s.make(Kind::Graph), kind)
}

fn kernel(function: u64, param_len: u32) -> KernelNode {
    KernelNode {
        function,
        grid: [1; 3],
        block: [32, 1, 1],
        shared: 0,
        param_len,
    }
}

fn memset(to: Range) -> CUDA_MEMSET_NODE_PARAMS {
    CUDA_MEMSET_NODE_PARAMS {
        to: to.start,
        pitch: 0,
        value: 0,
        element: 1,
        width: to.len,
        height: 1,
    }
}

/// A node that copies a row of memory.
fn copy(to: Range, from: Range) -> CUDA_MEMCPY3D {
    CUDA_MEMCPY3D {
        src_type: CU_MEMORYTYPE_DEVICE,
        src_device: from.start,
        dst_type: CU_MEMORYTYPE_DEVICE,
        dst_device: to.start,
        width: to.len.max(from.len),
        height: 1,
        depth: 1,
        ..CUDA_MEMCPY3D::default()
    }
}

fn start(s: &Scene) -> Range {
    Range {
        start: s.memory.start,
        len: 0,
    }
}

fn child(graph: u64, ownership: u32) -> CUDA_CHILD_GRAPH_NODE_PARAMS {
    CUDA_CHILD_GRAPH_NODE_PARAMS {
        graph,
        ownership,
        pad: 0,
    }
}

fn allocation(device: u32) -> CUDA_MEM_ALLOC_NODE_PARAMS {
    CUDA_MEM_ALLOC_NODE_PARAMS {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        location_kind: CU_MEM_LOCATION_TYPE_DEVICE,
        location: device,
        bytes: 4096,
        ..CUDA_MEM_ALLOC_NODE_PARAMS::default()
    }
}

fn write(address: u64) -> [u64; 6] {
    [
        u64::from(CU_STREAM_MEM_OP_WRITE_VALUE_32),
        address,
        1,
        0,
        0,
        0,
    ]
}

fn batch(s: &mut Scene, operation: [u64; 6]) -> Draft {
    add_new(s, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP)
        .with(&BatchNode { count: 1, flags: 0 })
        .with(&operation)
}

/// A node that is changed, in an instance if there is one.
fn change(node: u64, exec: u64, kind: u32) -> Draft {
    Draft::of(&GraphNode {
        object: node,
        exec,
        kind,
        flags: node_flags::CHANGE,
        ..GraphNode::default()
    })
}

/// A memset node, its graph, and an instance of it.
fn with_memset(s: &mut Scene) -> (u64, u64, u64) {
    let graph = s.make(Kind::Graph);
    let body = GraphNode {
        object: graph,
        kind: CU_GRAPH_NODE_TYPE_MEMSET,
        ..GraphNode::default()
    };
    let does = memset(s.memory);
    let does = does.as_bytes();
    let added: GraphNodeAdded = s.peer.ask(Op::GraphNode, &body, does).expect("a node");
    (added.node, graph, instance(s, graph))
}

fn instance(s: &mut Scene, graph: u64) -> u64 {
    let body = GraphInstantiate {
        graph,
        ..GraphInstantiate::default()
    };
    let made: GraphInstantiated = s
        .peer
        .ask(Op::GraphInstantiate, &body, &[])
        .expect("an instance");
    assert_ne!(made.exec, 0);
    made.exec
}

/// A graph with a kernel node, and the node.
fn with_kernel(s: &mut Scene) -> u64 {
    let body = GraphNode {
        object: s.make(Kind::Graph),
        kind: CU_GRAPH_NODE_TYPE_KERNEL,
        ..GraphNode::default()
    };
    let does = kernel(s.function, 16);
    let mut does = does.as_bytes().to_vec();
    does.extend_from_slice(&[0; 16]);
    let added: GraphNodeAdded = s.peer.ask(Op::GraphNode, &body, &does).expect("a node");
    added.node
}

fn attribute(node: u64, id: u32, set: u32) -> Draft {
    Draft::of(&GraphAttribute {
        node,
        id,
        set,
        value: [0; 8],
    })
}

fn enabled(exec: u64, node: u64, set: u32) -> Draft {
    Draft::of(&GraphEnabled {
        exec,
        node,
        set,
        enabled: 1,
    })
}

fn memory(device: u32, what: u32) -> Draft {
    Draft::of(&GraphMemory {
        value: 0,
        device,
        attribute: 0,
        what,
        pad: 0,
    })
}

fn condition(graph: u64, device: u32) -> Draft {
    Draft::of(&GraphCondition {
        graph,
        device,
        ..GraphCondition::default()
    })
}

pub fn table() -> Table {
    let mut t = Table::default();
    graphs(&mut t);
    nodes_added(&mut t);
    nodes_changed(&mut t);
    instances(&mut t);
    t
}

fn graphs(t: &mut Table) {
    t.op(Op::GraphCreate)
        .device(|_, device| Draft::of(&GraphCreate { flags: 0, device }))
        .refused("unknown flags", CUDA_ERROR_INVALID_VALUE, |_| {
            Draft::of(&GraphCreate {
                flags: 1,
                device: 0,
            })
        });
    t.op(Op::GraphDestroy)
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |_, graph| {
            object(graph)
        })
        .refused(
            "a graph that a capture fills",
            CUDA_ERROR_ILLEGAL_STATE,
            |s| {
                let (stream, graph) = (s.make(Kind::Stream), s.make(Kind::Graph));
                let body = CaptureBegin {
                    stream,
                    graph,
                    nodes: 0,
                    edges: 0,
                };
                let begun = s.peer.ask_as(0, Op::CaptureBegin, &body, &[]);
                begun.expect("a capture");
                object(graph)
            },
        )
        .refused("a graph that a node has", CUDA_ERROR_INVALID_VALUE, |s| {
            let (outer, inner) = (s.make(Kind::Graph), s.make(Kind::Graph));
            let body = GraphNode {
                object: outer,
                kind: CU_GRAPH_NODE_TYPE_GRAPH,
                ..GraphNode::default()
            };
            let does = child(inner, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE);
            let does = does.as_bytes();
            let added = s.peer.ask_as(0, Op::GraphNode, &body, does);
            added.expect("a node");
            object(inner)
        });
    t.op(Op::GraphClone)
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |_, graph| {
            object(graph)
        });
    t.op(Op::GraphFindInClone)
        .fine("a node and a clone of its graph", |s| {
            let (graph, node, _) = nodes(s);
            pair(node, clone(s, graph))
        })
        .handle_where(
            Kind::GraphNode,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, node| {
                let graph = s.make(Kind::Graph);
                pair(node, clone(s, graph))
            },
        )
        .handle_where(
            Kind::Graph,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, graph| pair(s.make(Kind::GraphNode), graph),
        );
    t.op(Op::GraphList)
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |_, graph| {
            list(graph, list::NODES)
        })
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |_, graph| {
            list(graph, list::EDGES)
        })
        .handle(Kind::GraphNode, CUDA_ERROR_INVALID_VALUE, |_, node| {
            list(node, list::DEPENDENCIES)
        })
        .handle(Kind::GraphNode, CUDA_ERROR_INVALID_VALUE, |_, node| {
            list(node, list::DEPENDENTS)
        })
        .refused("an unknown list", CUDA_ERROR_INVALID_VALUE, |s| {
            list(s.make(Kind::Graph), 5)
        });
    t.op(Op::GraphDependencies)
        .fine("an edge", |s| {
            let (graph, from, to) = nodes(s);
            dependency(graph, 1).with(&[from, to])
        })
        .refused("an edge that is there", CUDA_ERROR_INVALID_VALUE, |s| {
            let (graph, from, to) = nodes(s);
            let body = GraphDependencies {
                graph,
                count: 1,
                remove: 0,
            };
            let ends = [from, to];
            let ends = ends.as_bytes();
            let made = s.peer.ask_as(0, Op::GraphDependencies, &body, ends);
            made.expect("an edge");
            dependency(graph, 1).with(&[from, to])
        })
        .refused("an edge that is not there", CUDA_ERROR_INVALID_VALUE, |s| {
            let (graph, from, to) = nodes(s);
            let body = GraphDependencies {
                graph,
                count: 1,
                remove: 1,
            };
            Draft::of(&body).with(&[from, to])
        })
        .handle_where(
            Kind::Graph,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, graph| {
                let (_, from, to) = nodes(s);
                dependency(graph, 1).with(&[from, to])
            },
        )
        .handle_where(
            Kind::GraphNode,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, from| {
                let (graph, _, to) = nodes(s);
                dependency(graph, 1).with(&[from, to])
            },
        )
        .handle_where(
            Kind::GraphNode,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, to| {
                let (graph, from, _) = nodes(s);
                dependency(graph, 1).with(&[from, to])
            },
        )
        .ends("nodes that are not in the message", |s| {
            let (graph, from, to) = nodes(s);
            dependency(graph, 64).with(&[from, to])
        })
        .ends("more nodes than there may be", |s| {
            let count = NODES_MOST as u32 + 1;
            dependency(s.make(Kind::Graph), count).with(&vec![0u64; 2 * count as usize][..])
        });
    t.op(Op::GraphDot)
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |_, graph| {
            Draft::of(&GraphDot {
                graph,
                flags: 0,
                pad: 0,
            })
        });
    t.op(Op::GraphMemory)
        .no_device(|_, device| memory(device, graph_memory::GET))
        .no_device(|_, device| memory(device, graph_memory::SET))
        .no_device(|_, device| memory(device, graph_memory::TRIM))
        .refused("an unknown call", CUDA_ERROR_INVALID_VALUE, |_| {
            memory(0, 3)
        });
    t.op(Op::GraphCondition)
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |_, graph| {
            condition(graph, 0)
        })
        .no_device(|s, device| condition(s.make(Kind::Graph), device));
}

fn clone(s: &mut Scene, graph: u64) -> u64 {
    let body = Object { object: graph };
    let made: Value = s.peer.ask(Op::GraphClone, &body, &[]).expect("a clone");
    made.value
}

fn nodes_added(t: &mut Table) {
    t.op(Op::GraphNode)
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |_, graph| {
            add(graph, CU_GRAPH_NODE_TYPE_EMPTY)
        })
        .device(|s, device| {
            Draft::of(&GraphNode {
                object: s.make(Kind::Graph),
                kind: CU_GRAPH_NODE_TYPE_EMPTY,
                device,
                ..GraphNode::default()
            })
        })
        .refused("an unknown kind", CUDA_ERROR_INVALID_VALUE, |s| {
            add_new(s, 99)
        })
        .refused(
            "semaphores of other programs",
            CUDA_ERROR_INVALID_VALUE,
            |s| add_new(s, CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT),
        )
        .fine("a node before it", |s| {
            let (graph, node, _) = nodes(s);
            after(graph, 1).with(&node)
        })
        .handle_where(
            Kind::GraphNode,
            // It is another graph's.
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, node| after(s.make(Kind::Graph), 1).with(&node),
        )
        .ends("nodes that are not in the message", |s| {
            after(s.make(Kind::Graph), 64)
        })
        .ends("more nodes than there may be", |s| {
            let nodes = vec![0u64; NODES_MOST + 1];
            after(s.make(Kind::Graph), nodes.len() as u32).with(&nodes[..])
        });
    t.op(Op::GraphNode)
        .handle(Kind::Function, CUDA_ERROR_INVALID_HANDLE, |s, function| {
            add_new(s, CU_GRAPH_NODE_TYPE_KERNEL)
                .with(&kernel(function, 16))
                .with(&[0u8; 16])
        })
        .refused(
            "fewer parameters than the kernel has",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                add_new(s, CU_GRAPH_NODE_TYPE_KERNEL)
                    .with(&kernel(s.function, 15))
                    .with(&[0u8; 16])
            },
        )
        .ends("parameters that are not in the message", |s| {
            add_new(s, CU_GRAPH_NODE_TYPE_KERNEL)
                .with(&kernel(s.function, 64))
                .with(&[0u8; 16])
        })
        .ends("more parameters than there may be", |s| {
            add_new(s, CU_GRAPH_NODE_TYPE_KERNEL)
                .with(&kernel(s.function, PARAMS_MAX as u32 + 1))
                .with(&vec![0u8; PARAMS_MAX + 1][..])
        })
        .ends("a kernel that is not in the message", |s| {
            add_new(s, CU_GRAPH_NODE_TYPE_KERNEL)
        })
        .range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            add_new(s, CU_GRAPH_NODE_TYPE_MEMSET).with(&memset(to))
        })
        .ends("a memset that is not in the message", |s| {
            add_new(s, CU_GRAPH_NODE_TYPE_MEMSET)
        })
        .refused("elements of 3 bytes", CUDA_ERROR_INVALID_VALUE, |s| {
            let does = CUDA_MEMSET_NODE_PARAMS {
                element: 3,
                width: 1,
                ..memset(s.memory)
            };
            add_new(s, CU_GRAPH_NODE_TYPE_MEMSET).with(&does)
        })
        .range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            add_new(s, CU_GRAPH_NODE_TYPE_MEMCPY).with(&copy(to, start(s)))
        })
        .range(CUDA_ERROR_INVALID_VALUE, |s, from| {
            add_new(s, CU_GRAPH_NODE_TYPE_MEMCPY).with(&copy(start(s), from))
        })
        .host_range(CUDA_ERROR_INVALID_VALUE, |s, from| {
            let does = CUDA_MEMCPY3D {
                src_type: CU_MEMORYTYPE_HOST,
                src_host: from.start,
                ..copy(start(s), from)
            };
            add_new(s, CU_GRAPH_NODE_TYPE_MEMCPY).with(&does)
        })
        .host_range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            let does = CUDA_MEMCPY3D {
                dst_type: CU_MEMORYTYPE_HOST,
                dst_host: to.start,
                ..copy(to, start(s))
            };
            add_new(s, CU_GRAPH_NODE_TYPE_MEMCPY).with(&does)
        })
        .handle(Kind::Array, CUDA_ERROR_INVALID_HANDLE, |s, array| {
            let does = CUDA_MEMCPY3D {
                dst_type: CU_MEMORYTYPE_ARRAY,
                dst_array: array,
                width: 64,
                ..copy(start(s), start(s))
            };
            add_new(s, CU_GRAPH_NODE_TYPE_MEMCPY).with(&does)
        })
        .refused("an unknown kind of memory", CUDA_ERROR_INVALID_VALUE, |s| {
            let does = CUDA_MEMCPY3D {
                dst_type: 99,
                ..copy(start(s), s.memory)
            };
            add_new(s, CU_GRAPH_NODE_TYPE_MEMCPY).with(&does)
        })
        .ends("a copy that is not in the message", |s| {
            add_new(s, CU_GRAPH_NODE_TYPE_MEMCPY)
        })
        .handle(Kind::Event, CUDA_ERROR_INVALID_HANDLE, |s, event| {
            add_new(s, CU_GRAPH_NODE_TYPE_EVENT_RECORD).with(&event)
        })
        .handle(Kind::Event, CUDA_ERROR_INVALID_HANDLE, |s, event| {
            add_new(s, CU_GRAPH_NODE_TYPE_WAIT_EVENT).with(&event)
        })
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |s, graph| {
            add_new(s, CU_GRAPH_NODE_TYPE_GRAPH).with(&child(graph, 0))
        })
        .refused("a graph in itself", CUDA_ERROR_INVALID_VALUE, |s| {
            let graph = s.make(Kind::Graph);
            add(graph, CU_GRAPH_NODE_TYPE_GRAPH)
                .with(&child(graph, CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE))
        })
        .ends("a graph that is not in the message", |s| {
            add_new(s, CU_GRAPH_NODE_TYPE_GRAPH)
        })
        .no_device(|s, device| add_new(s, CU_GRAPH_NODE_TYPE_MEM_ALLOC).with(&allocation(device)))
        .no_device(|s, device| {
            let does = CUDA_MEM_ALLOC_NODE_PARAMS {
                access_count: 1,
                ..allocation(0)
            };
            let access = Access {
                kind: CU_MEM_LOCATION_TYPE_DEVICE,
                id: device as i32,
                flags: 3,
            };
            add_new(s, CU_GRAPH_NODE_TYPE_MEM_ALLOC)
                .with(&does)
                .with(&access)
        })
        .refused(
            "more devices than there may be",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                let does = CUDA_MEM_ALLOC_NODE_PARAMS {
                    access_count: u64::MAX,
                    ..allocation(0)
                };
                add_new(s, CU_GRAPH_NODE_TYPE_MEM_ALLOC).with(&does)
            },
        )
        .ends("devices that are not in the message", |s| {
            let does = CUDA_MEM_ALLOC_NODE_PARAMS {
                access_count: 64,
                ..allocation(0)
            };
            add_new(s, CU_GRAPH_NODE_TYPE_MEM_ALLOC).with(&does)
        })
        .refused("another session's memory", CUDA_ERROR_INVALID_VALUE, |s| {
            add_new(s, CU_GRAPH_NODE_TYPE_MEM_FREE).with(&s.others_memory.start)
        })
        .address(CUDA_ERROR_INVALID_VALUE, |s, address| {
            batch(s, write(address))
        })
        .refused("an unknown operation", CUDA_ERROR_INVALID_VALUE, |s| {
            let [_, address, ..] = write(s.memory.start);
            batch(s, [9, address, 0, 0, 0, 0])
        })
        .refused(
            "more operations than there may be",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                let count = 257;
                add_new(s, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP)
                    .with(&BatchNode { count, flags: 0 })
                    .with(&vec![[0u64; 6]; count as usize][..])
            },
        )
        .ends("operations that are not in the message", |s| {
            add_new(s, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP).with(&BatchNode {
                count: 64,
                flags: 0,
            })
        })
        .refused(
            "a condition that is not there",
            CUDA_ERROR_INVALID_VALUE,
            |s| {
                let does = CUDA_CONDITIONAL_NODE_PARAMS {
                    handle: 1 << 40,
                    size: 1,
                    ..CUDA_CONDITIONAL_NODE_PARAMS::default()
                };
                add_new(s, CU_GRAPH_NODE_TYPE_CONDITIONAL).with(&does)
            },
        );
    for op in [Op::GraphNodeGet, Op::GraphNodeKind, Op::GraphNodeDestroy] {
        t.op(op)
            .handle(Kind::GraphNode, CUDA_ERROR_INVALID_VALUE, |_, node| {
                object(node)
            });
    }
}

fn after(graph: u64, nodes: u32) -> Draft {
    Draft::of(&GraphNode {
        object: graph,
        kind: CU_GRAPH_NODE_TYPE_EMPTY,
        nodes,
        ..GraphNode::default()
    })
}

fn nodes_changed(t: &mut Table) {
    t.op(Op::GraphNode)
        .fine("a node of the graph", |s| {
            let (node, ..) = with_memset(s);
            change(node, 0, CU_GRAPH_NODE_TYPE_MEMSET).with(&memset(s.memory))
        })
        .range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            let (node, ..) = with_memset(s);
            change(node, 0, CU_GRAPH_NODE_TYPE_MEMSET).with(&memset(to))
        })
        .range(CUDA_ERROR_INVALID_VALUE, |s, to| {
            let (node, _, exec) = with_memset(s);
            change(node, exec, CU_GRAPH_NODE_TYPE_MEMSET).with(&memset(to))
        })
        // Its kind is another.
        .handle_where(
            Kind::GraphNode,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, node| change(node, 0, CU_GRAPH_NODE_TYPE_MEMSET).with(&memset(s.memory)),
        )
        // It is another graph's.
        .handle_where(
            Kind::GraphExec,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, exec| {
                let (node, ..) = with_memset(s);
                change(node, exec, CU_GRAPH_NODE_TYPE_MEMSET).with(&memset(s.memory))
            },
        );
    for set in [0, 1] {
        let make: fn(&mut Scene) -> Draft = match set {
            0 => |s| attribute(with_kernel(s), CU_LAUNCH_ATTRIBUTE_PRIORITY, 0),
            _ => |s| attribute(with_kernel(s), CU_LAUNCH_ATTRIBUTE_PRIORITY, 1),
        };
        t.op(Op::GraphAttribute).fine("a kernel node", make);
    }
    t.op(Op::GraphAttribute)
        // It launches nothing.
        .handle_where(
            Kind::GraphNode,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |_, node| attribute(node, CU_LAUNCH_ATTRIBUTE_PRIORITY, 0),
        )
        .refused("an event", CUDA_ERROR_NOT_SUPPORTED, |s| {
            attribute(with_kernel(s), CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT, 1)
        })
        .refused(
            "an event of its completion",
            CUDA_ERROR_NOT_SUPPORTED,
            |s| {
                attribute(
                    with_kernel(s),
                    CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT,
                    1,
                )
            },
        )
        .refused(
            "a node that kernels may change",
            CUDA_ERROR_NOT_SUPPORTED,
            |s| {
                attribute(
                    with_kernel(s),
                    CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE,
                    1,
                )
            },
        );
    t.op(Op::GraphCopyAttributes)
        .fine("kernel nodes", |s| pair(with_kernel(s), with_kernel(s)))
        .handle_where(
            Kind::GraphNode,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, node| pair(node, with_kernel(s)),
        )
        .handle_where(
            Kind::GraphNode,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, node| pair(with_kernel(s), node),
        );
}

fn instantiate(graph: u64) -> GraphInstantiate {
    GraphInstantiate {
        graph,
        ..GraphInstantiate::default()
    }
}

fn instances(t: &mut Table) {
    t.op(Op::GraphInstantiate)
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |_, graph| {
            Draft::of(&instantiate(graph))
        })
        .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
            Draft::of(&GraphInstantiate {
                stream,
                with_params: 1,
                ..instantiate(s.make(Kind::Graph))
            })
        })
        .refused(
            "an instance that kernels may launch",
            CUDA_ERROR_NOT_SUPPORTED,
            |s| {
                Draft::of(&GraphInstantiate {
                    flags: 4,
                    ..instantiate(s.make(Kind::Graph))
                })
            },
        )
        .ends("slots that are not in the message", |s| {
            Draft::of(&GraphInstantiate {
                slots: 64,
                ..instantiate(s.make(Kind::Graph))
            })
        })
        .ends("a slot that is not there", |s| {
            let graph = s.make(Kind::Graph);
            let body = GraphNode {
                object: graph,
                kind: CU_GRAPH_NODE_TYPE_HOST,
                ..GraphNode::default()
            };
            let does = HostNode { token: 1, pad: 0 };
            let does = does.as_bytes();
            let added = s.peer.ask_as(0, Op::GraphNode, &body, does);
            added.expect("a node");
            let slots = 1;
            Draft::of(&GraphInstantiate {
                slots,
                ..instantiate(graph)
            })
            .with(&FLAGS)
        });
    for op in [Op::GraphLaunch, Op::GraphUpload] {
        t.op(op)
            .handle(Kind::GraphExec, CUDA_ERROR_INVALID_VALUE, |s, exec| {
                launch(exec, s.stream)
            })
            .handle(Kind::Stream, CUDA_ERROR_INVALID_HANDLE, |s, stream| {
                launch(s.make(Kind::GraphExec), stream)
            });
    }
    for op in [Op::GraphExecFlags, Op::GraphExecDestroy] {
        t.op(op)
            .handle(Kind::GraphExec, CUDA_ERROR_INVALID_VALUE, |_, exec| {
                object(exec)
            });
    }
    t.op(Op::GraphExecUpdate)
        .handle(Kind::GraphExec, CUDA_ERROR_INVALID_VALUE, |s, exec| {
            pair(exec, s.make(Kind::Graph))
        })
        .handle(Kind::Graph, CUDA_ERROR_INVALID_VALUE, |s, graph| {
            pair(s.make(Kind::GraphExec), graph)
        });
    for set in [0, 1] {
        let make: fn(&mut Scene) -> Draft = match set {
            0 => |s| {
                let (node, _, exec) = with_memset(s);
                enabled(exec, node, 0)
            },
            _ => |s| {
                let (node, _, exec) = with_memset(s);
                enabled(exec, node, 1)
            },
        };
        t.op(Op::GraphEnabled).fine("a node of its graph", make);
    }
    t.op(Op::GraphEnabled)
        .handle_where(
            Kind::GraphExec,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, exec| {
                let (node, ..) = with_memset(s);
                enabled(exec, node, 0)
            },
        )
        .handle_where(
            Kind::GraphNode,
            (CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE),
            |s, node| {
                let (_, _, exec) = with_memset(s);
                enabled(exec, node, 1)
            },
        );
}
