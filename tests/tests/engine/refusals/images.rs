//! Modules, libraries, functions, the linker.

use mpsshim_api::cuda::*;
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::image::*;
use mpsshim_proto::message::*;
use mpsshim_tests::peer::{PTX, memory_file};
use mpsshim_tests::refusals::{Draft, Scene, Table};
use std::os::fd::OwnedFd;

fn content() -> OwnedFd {
    memory_file(PTX.as_bytes()).expect("a memory file")
}

fn load(s: &mut Scene, image: u64) -> ImageLoad {
    ImageLoad {
        image,
        ..s.peer.image_load(PTX.as_bytes())
    }
}

fn new_load(s: &mut Scene) -> ImageLoad {
    s.peer.image_load(PTX.as_bytes())
}

fn named(parent: u64, device: u32) -> Draft {
    Draft::of(&Named {
        parent,
        device,
        pad: 0,
    })
}

fn get(s: &mut Scene, parent: u64) -> Draft {
    let function = s.unused(Kind::Function);
    Draft::of(&GetFunction {
        parent,
        function,
        ..GetFunction::default()
    })
}

fn attribute(function: u64, attribute: u32) -> Draft {
    Draft::of(&FunctionAttribute {
        function,
        attribute,
        value: 0,
    })
}

fn occupancy(function: u64, block: i32, kind: u32) -> Draft {
    Draft::of(&Occupancy {
        function,
        shared: 1,
        block,
        flags: 0,
        kind,
        pad: 0,
    })
}

fn kernel_attribute(library: u64, device: u32, set: u32) -> Draft {
    Draft::of(&KernelAttribute {
        library,
        device,
        attribute: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        set,
        value: 0,
    })
}

fn link_add(link: u64, kind: u32) -> Draft {
    Draft::of(&LinkAdd {
        link,
        len: PTX.len() as u64,
        kind,
        options: 0,
    })
    .with(b"ptx\0")
}

/// A module with a variable.
fn with_variable(s: &mut Scene) -> u64 {
    s.peer.module(VARIABLE.as_bytes()).expect("a module")
}

const VARIABLE: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .b8 table[64];
.visible .entry idle() { ret; }
";

pub fn table() -> Table {
    let mut t = Table::default();
    t.op(Op::ImageLoad)
        .new_handle(Kind::Module, CUDA_ERROR_INVALID_HANDLE, |s, image| {
            Draft::of(&load(s, image)).carrying(content())
        })
        .new_handle(Kind::Library, CUDA_ERROR_INVALID_HANDLE, |s, image| {
            Draft::of(&load(s, image)).carrying(content())
        })
        .device(|s, device| {
            let body = new_load(s);
            Draft::of(&ImageLoad { device, ..body }).carrying(content())
        })
        .no_device(|s, device| {
            let image = s.unused(Kind::Library);
            let body = load(s, image);
            Draft::of(&ImageLoad { device, ..body }).carrying(content())
        })
        .refused("a hash that nobody has sent", CUDA_ERROR_NOT_FOUND, |s| {
            let mut body = new_load(s);
            body.hash[0] ^= 1;
            Draft::of(&body)
        })
        .refused("another hash", CUDA_ERROR_INVALID_IMAGE, |s| {
            let mut body = new_load(s);
            body.hash[0] ^= 1;
            Draft::of(&body).carrying(content())
        })
        .refused("more than the file has", CUDA_ERROR_INVALID_IMAGE, |s| {
            let mut body = new_load(s);
            body.len += 1;
            Draft::of(&body).carrying(content())
        })
        .refused("no bytes", CUDA_ERROR_INVALID_IMAGE, |s| {
            let mut body = new_load(s);
            body.len = 0;
            Draft::of(&body).carrying(content())
        })
        .refused("a length that overflows", CUDA_ERROR_INVALID_IMAGE, |s| {
            let mut body = new_load(s);
            body.len = u64::MAX;
            Draft::of(&body).carrying(content())
        })
        .refused("a pipe", CUDA_ERROR_INVALID_IMAGE, |s| {
            let pipe = std::io::pipe().expect("a pipe").0;
            Draft::of(&new_load(s)).carrying(pipe.into())
        })
        .ends("options that are not in the message", |s| {
            let body = new_load(s);
            Draft::of(&ImageLoad { options: 1, ..body }).carrying(content())
        })
        .ends("more options than a message has room for", |s| {
            let body = new_load(s);
            let options = u32::MAX;
            Draft::of(&ImageLoad { options, ..body }).carrying(content())
        })
        .ends("no descriptor", |s| Draft::of(&new_load(s)).promising());
    t.op(Op::ImageUnload)
        .handle(Kind::Module, CUDA_ERROR_INVALID_HANDLE, |_, object| {
            Draft::of(&Object { object })
        })
        .handle(Kind::Library, CUDA_ERROR_INVALID_HANDLE, |_, object| {
            Draft::of(&Object { object })
        });
    t.op(Op::GetFunction)
        .handle(Kind::Module, CUDA_ERROR_INVALID_HANDLE, |s, parent| {
            get(s, parent).with(b"fill\0")
        })
        .handle(Kind::Library, CUDA_ERROR_INVALID_HANDLE, |s, parent| {
            get(s, parent).with(b"fill\0")
        })
        // Only looked for.
        .handle(Kind::Library, CUDA_ERROR_INVALID_HANDLE, |_, parent| {
            let body = GetFunction {
                parent,
                ..GetFunction::default()
            };
            Draft::of(&body).with(b"fill\0")
        })
        .refused(
            "a module in which a kernel is only looked for",
            CUDA_ERROR_INVALID_HANDLE,
            |s| {
                let body = GetFunction {
                    parent: s.module,
                    ..GetFunction::default()
                };
                Draft::of(&body).with(b"fill\0")
            },
        )
        .new_handle(Kind::Function, CUDA_ERROR_INVALID_HANDLE, |s, function| {
            let body = GetFunction {
                parent: s.module,
                function,
                ..GetFunction::default()
            };
            Draft::of(&body).with(b"fill\0")
        })
        .no_device(|s, device| {
            let (parent, function) = (s.make(Kind::Library), s.unused(Kind::Function));
            let body = GetFunction {
                parent,
                function,
                device,
                pad: 0,
            };
            Draft::of(&body).with(b"fill\0")
        })
        .name("fill", CUDA_ERROR_NOT_FOUND, |s| {
            let module = s.module;
            get(s, module)
        });
    t.op(Op::GetGlobal)
        .handle_where(
            Kind::Module,
            (CUDA_ERROR_NOT_FOUND, CUDA_ERROR_INVALID_HANDLE),
            |_, parent| named(parent, 0).with(b"table\0"),
        )
        .no_device(|s, device| named(s.make(Kind::Library), device).with(b"table\0"))
        .name("table", CUDA_ERROR_NOT_FOUND, |s| {
            let module = with_variable(s);
            named(module, 0)
        });
    t.op(Op::GetManaged)
        .handle_where(
            Kind::Library,
            (CUDA_ERROR_NOT_FOUND, CUDA_ERROR_INVALID_HANDLE),
            |_, parent| named(parent, 0).with(b"table\0"),
        )
        .refused("a module", CUDA_ERROR_INVALID_HANDLE, |s| {
            named(s.module, 0).with(b"table\0")
        })
        .ends("a name without its end", |s| {
            named(s.make(Kind::Library), 0).with_endless_name()
        });
    t.op(Op::EnumerateFunctions)
        .handle(Kind::Module, CUDA_ERROR_INVALID_HANDLE, |_, parent| {
            named(parent, 0)
        })
        .handle(Kind::Library, CUDA_ERROR_INVALID_HANDLE, |_, parent| {
            named(parent, 0)
        });
    t.op(Op::ImageLeave)
        .handle(Kind::Library, CUDA_ERROR_INVALID_HANDLE, |_, parent| {
            named(parent, 0)
        })
        .refused("a module", CUDA_ERROR_INVALID_HANDLE, |s| {
            named(s.module, 0)
        })
        .device(|s, device| named(s.make(Kind::Library), device));
    t.op(Op::GetFunctionAttribute)
        .handle(Kind::Function, CUDA_ERROR_INVALID_HANDLE, |_, function| {
            attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        })
        .refused("an unknown attribute", CUDA_ERROR_INVALID_VALUE, |s| {
            attribute(s.function, 99)
        });
    t.op(Op::SetFunctionAttribute)
        .handle(Kind::Function, CUDA_ERROR_INVALID_HANDLE, |_, function| {
            attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        })
        .refused("an unknown attribute", CUDA_ERROR_INVALID_VALUE, |s| {
            attribute(s.function, 99)
        })
        .refused(
            "an attribute that is only read",
            CUDA_ERROR_INVALID_VALUE,
            |s| attribute(s.function, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
        );
    t.op(Op::Occupancy)
        .handle(Kind::Function, CUDA_ERROR_INVALID_HANDLE, |_, function| {
            occupancy(function, 32, 0)
        })
        .handle(Kind::Function, CUDA_ERROR_INVALID_HANDLE, |_, function| {
            occupancy(function, 32, 1)
        })
        .refused("blocks without threads", CUDA_ERROR_INVALID_VALUE, |s| {
            occupancy(s.function, 0, 0)
        })
        .refused("fewer threads than none", CUDA_ERROR_INVALID_VALUE, |s| {
            occupancy(s.function, -1, 1)
        });
    for set in [0, 1] {
        let mut rows = t.op(Op::KernelAttribute);
        let make: fn(&mut Scene, u64) -> Draft = match set {
            0 => |_, library| kernel_attribute(library, 0, 0).with(b"fill\0"),
            _ => |_, library| kernel_attribute(library, 0, 1).with(b"fill\0"),
        };
        rows.handle(Kind::Library, CUDA_ERROR_INVALID_HANDLE, make);
    }
    t.op(Op::KernelAttribute)
        .refused("a module", CUDA_ERROR_INVALID_HANDLE, |s| {
            kernel_attribute(s.module, 0, 0).with(b"fill\0")
        })
        .device(|s, device| kernel_attribute(s.make(Kind::Library), device, 0).with(b"fill\0"))
        .device(|s, device| kernel_attribute(s.make(Kind::Library), device, 1).with(b"fill\0"))
        .name("fill", CUDA_ERROR_NOT_FOUND, |s| {
            kernel_attribute(s.make(Kind::Library), 0, 1)
        });
    t.op(Op::LinkCreate)
        .new_handle(Kind::Link, CUDA_ERROR_INVALID_HANDLE, |_, link| {
            Draft::of(&LinkCreate {
                link,
                ..LinkCreate::default()
            })
        })
        .device(|s, device| {
            let link = s.unused(Kind::Link);
            Draft::of(&LinkCreate {
                link,
                device,
                ..LinkCreate::default()
            })
        })
        .ends("options that are not in the message", |s| {
            let link = s.unused(Kind::Link);
            Draft::of(&LinkCreate {
                link,
                options: 1,
                ..LinkCreate::default()
            })
        });
    t.op(Op::LinkAdd)
        .handle(Kind::Link, CUDA_ERROR_INVALID_HANDLE, |_, link| {
            link_add(link, CU_JIT_INPUT_PTX).carrying(content())
        })
        .refused("an unknown kind", CUDA_ERROR_INVALID_VALUE, |s| {
            link_add(s.make(Kind::Link), CU_JIT_NUM_INPUT_TYPES).carrying(content())
        })
        .refused("no data", CUDA_ERROR_INVALID_VALUE, |s| {
            link_add(s.make(Kind::Link), CU_JIT_INPUT_PTX)
        })
        .refused("less data than it says", CUDA_ERROR_INVALID_VALUE, |s| {
            let short = memory_file(&PTX.as_bytes()[..64]).expect("a memory file");
            link_add(s.make(Kind::Link), CU_JIT_INPUT_PTX).carrying(short)
        })
        .ends("a name without its end", |s| {
            let link = s.make(Kind::Link);
            Draft::of(&LinkAdd {
                link,
                len: PTX.len() as u64,
                kind: CU_JIT_INPUT_PTX,
                options: 0,
            })
            .with_endless_name()
            .carrying(content())
        })
        .ends("options that are not in the message", |s| {
            let link = s.make(Kind::Link);
            Draft::of(&LinkAdd {
                link,
                len: PTX.len() as u64,
                kind: CU_JIT_INPUT_PTX,
                options: 1,
            })
            .with(b"ptx\0")
            .carrying(content())
        })
        .ends("no descriptor", |s| {
            link_add(s.make(Kind::Link), CU_JIT_INPUT_PTX).promising()
        });
    t.op(Op::LinkComplete)
        // Nothing was added.
        .handle_where(
            Kind::Link,
            (CUDA_ERROR_INVALID_SOURCE, CUDA_ERROR_INVALID_HANDLE),
            |_, object| Draft::of(&Object { object }),
        );
    t.op(Op::LinkFetch).handle_where(
        Kind::Link,
        (CUDA_ERROR_NOT_FOUND, CUDA_ERROR_INVALID_HANDLE),
        |_, object| Draft::of(&Object { object }),
    );
    t.op(Op::LinkDestroy)
        .handle(Kind::Link, CUDA_ERROR_INVALID_HANDLE, |_, object| {
            Draft::of(&Object { object })
        });
    t
}
