//! Functions and kernels: lookup, parameters, attributes.

use super::reply::{Reply, number};
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::moment::Want;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::printing::session::take_printed;
use crate::engine::calls::module::{image_ready, separate};
use crate::engine::images::contents::Raw;
use crate::engine::images::instances::Key;
use crate::engine::objects::functions::Function;
use crate::engine::objects::pace::Length;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::image::KernelAttribute;
use mpsshim_proto::message::{FunctionAttribute, FunctionInfo, GetFunction, Param, Value};
use mpsshim_proto::segment::ANSWER_LEN;
use std::cell::Cell;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Queries one parameter after the other until the driver reports no more.
fn params_of(info: impl Fn(usize, &mut usize, &mut usize) -> Result<(), CUresult>) -> Vec<Param> {
    let mut params = Vec::new();
    for index in 0..MAX_PARAMS {
        let (mut offset, mut size) = (0, 0);
        if info(index, &mut offset, &mut size).is_err() {
            break;
        }
        params.push(Param {
            offset: offset as u32,
            size: size as u32,
        });
    }
    params
}

/// Whether a function is launched in clusters, according to its attributes; attributes unknown to an older driver count
/// as unset.
fn has_clusters(attributes: &[i32; 16]) -> bool {
    let of_clusters = [
        CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET,
        CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
    ];
    of_clusters
        .iter()
        .any(|attribute| attributes[*attribute as usize] > 0)
}

/// Bytes of local memory, according to a function's attributes.
fn local(attributes: &[i32; 16]) -> u32 {
    let local = attributes[CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES as usize];
    local.max(0) as u32
}

/// Longest time spent on looking up functions that the client has not asked for yet.
const AHEAD: Duration = Duration::from_millis(2);
/// Longest time spent on loading libraries of which the client has used nothing yet.
const LOADS_AHEAD: Duration = Duration::from_millis(5);

/// Maximum number of kernel parameters considered: one per byte of the parameter space would be 32,764.
const MAX_PARAMS: usize = 4096;

/// The function behind a handle, for a launch or a query. Takes it from its image on first use.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`; [`CallError::Alone`] if it has to be loaded at a quiescent point; driver errors.
#[inline]
pub fn function<'a>(
    session: &'a mut Session,
    shared: &Shared,
    handle: u64,
) -> Result<&'a Function, CallError> {
    let function = session.objects.functions.get(handle)?;
    if !function.taken {
        let loads = session.objects.image(function.image)?.loads_to_take(
            &shared.images,
            &function.key,
            None,
        );
        if loads && session.flow.moment.is_none() {
            session.flow.wants = Some(Want::Function(handle));
            return Err(CallError::Alone);
        }
        take_function(session, shared, handle)?;
    }
    let function = session.objects.functions.get_mut(handle)?;
    function.asked = true;
    Ok(function)
}

/// `cuModuleGetFunction`; `cuLibraryGetKernel`, and `cuKernelGetFunction` for one device. A kernel's function is
/// loaded here, on the slow lane, so that no launch has to load it.
pub fn get_function(session: &mut Session, shared: &Shared, call: Call<'_, GetFunction>) -> Reply {
    let Call { body, message } = call;
    let name = message.name::<GetFunction>()?;
    let driver = &shared.gpu.driver;
    if body.function == 0 {
        return describe_kernel(session, shared, body.parent, &name);
    }
    let (_, device, prints) = image_ready(session, shared, body.parent, body.device)?;
    let key: Key = (name.into(), device);
    let raw = session
        .objects
        .image(body.parent)?
        .look(&shared.images, &key)?;
    look_ahead(session, shared, body.parent, device);
    let mut info = FunctionInfo {
        attributes: [i32::MIN; 16],
        ..FunctionInfo::default()
    };
    for (attribute, value) in info.attributes.iter_mut().enumerate() {
        let _ = driver.func_get_attribute(value, attribute as u32, raw);
    }
    let image = session.objects.image(body.parent)?;
    image.correct(&key, &mut info.attributes);
    let taken = !image.is_tracked();
    if session.flow.moment.is_some() {
        shared.gpu.devices[device].want_local_ahead(local(&info.attributes));
    }
    let params =
        params_of(|index, offset, size| driver.func_get_param_info(raw, index, offset, size));
    info.params = params.len() as u32;
    info.flags = session.objects.image(body.parent)?.calls.flags(&key.0);
    let param_bytes = params
        .iter()
        .map(|param| param.offset + param.size)
        .max()
        .unwrap_or(0);
    let mut payload = info.as_bytes().to_vec();
    payload.extend_from_slice(params.as_bytes());
    let keeps = session.keeps_variables(&shared.images, body.parent);
    let function = Function {
        keeps,
        launched: Cell::new(false),
        traced: (0, 0),
        raw,
        taken,
        asked: false,
        key,
        param_bytes,
        image: body.parent,
        device,
        prints,
        in_runs: !has_clusters(&info.attributes),
        length: Length::Unknown,
        local: local(&info.attributes),
        block: Cell::default(),
    };
    let (name, _) = &function.key;
    session.shared.launched.name(body.function, name);
    session
        .objects
        .functions
        .insert(body.function, function)
        .map_err(|(status, _)| status)?;
    Ok(payload)
}

/// At the session's quiescent point, looks up further functions of this image and of its libraries that the client
/// is likely to use, within short time limits: each would otherwise need a quiescent point of its own.
pub fn look_ahead(session: &Session, shared: &Shared, first: u64, device: Ordinal) {
    let Some(moment) = &session.flow.moment else {
        return;
    };
    // Includes waiting for other threads that are loading.
    let began = Instant::now();
    let may_load = || !moment.is_over() && began.elapsed() < LOADS_AHEAD;
    for library in session.objects.libraries.iter() {
        library.load_ahead(&shared.images, device, &may_load);
    }
    let began = Instant::now();
    let may = || !moment.is_over() && began.elapsed() < AHEAD;
    if let Ok(first) = session.objects.image(first) {
        first.look_ahead(&shared.images, device, &may);
    }
    for library in session.objects.libraries.iter() {
        library.look_ahead(&shared.images, device, &may);
    }
}

/// A kernel of a library for any device: whether it exists, and its parameters.
fn describe_kernel(session: &Session, shared: &Shared, library: u64, name: &[u8]) -> Reply {
    let driver = &shared.gpu.driver;
    let kernel = kernel(session, shared, library, name)?;
    let params =
        params_of(|index, offset, size| driver.kernel_get_param_info(kernel, index, offset, size));
    let info = FunctionInfo {
        attributes: [i32::MIN; 16],
        params: params.len() as u32,
        flags: session.objects.libraries.get(library)?.calls.flags(name),
    };
    let mut payload = info.as_bytes().to_vec();
    payload.extend_from_slice(params.as_bytes());
    Ok(payload)
}

fn kernel(
    session: &Session,
    shared: &Shared,
    library: u64,
    name: &[u8],
) -> Result<CUkernel, CUresult> {
    let Raw::Library(library) = session.objects.libraries.get(library)?.raw() else {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    };
    shared.gpu.use_any_device();
    let mut kernel = CUkernel::NULL;
    shared
        .gpu
        .driver
        .library_get_kernel(&mut kernel, library, name.as_ptr().cast())?;
    Ok(kernel)
}

/// Determines the function that launches of a handle use from now on, with the attributes set for it.
pub fn take_function(session: &mut Session, shared: &Shared, handle: u64) -> Result<(), CUresult> {
    let function = session.objects.functions.get(handle)?;
    let (image, key) = (function.image, function.key.clone());
    let raw = session
        .objects
        .image_mut(image)?
        .take(&shared.images, &key)?;
    give_function(session, image, &key, raw);
    Ok(())
}

fn give_function(session: &mut Session, image: u64, key: &Key, raw: CUfunction) {
    let same = |function: &&mut Function| function.image == image && function.key == *key;
    for function in session.objects.functions.iter_mut().filter(same) {
        (function.raw, function.taken) = (raw, true);
    }
}

/// `cuKernelGetAttribute`, `cuKernelSetAttribute`.
pub fn kernel_attribute(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, KernelAttribute>,
) -> Reply {
    let Call { body, message } = call;
    let name = message.name::<KernelAttribute>()?;
    let device = shared.gpu.device(body.device)?;
    let image = session.objects.libraries.get_mut(body.library)?;
    if image.is_tracked() {
        let key: Key = (name.clone().into(), device.ordinal);
        if body.set == 0 {
            if let Some(value) = image.of_kernel(&key, body.attribute) {
                return Ok(number(value as i64 as u64));
            }
        } else if device.make_current(&shared.gpu.driver).is_ok() {
            let set = (body.attribute, body.value);
            let raw = image.set(&shared.images, &key, set, true)?;
            give_function(session, body.library, &key, raw);
            return Ok(number(body.value as i64 as u64));
        } else {
            separate(session, shared, body.library)?;
        }
    }
    let kernel = kernel(session, shared, body.library, &name)?;
    // May fail: a device to which no client has attached has no context, and the call needs none.
    let _ = device.make_current(&shared.gpu.driver);
    let device = device.raw;
    let image = &shared.gpu.driver.image;
    let mut value = body.value;
    if body.set == 0 {
        image.kernel_get_attribute(&mut value, body.attribute, kernel, device)?;
    } else {
        image.kernel_set_attribute(body.attribute, value, kernel, device)?;
    }
    Ok(number(value as i64 as u64))
}

/// The driver's function behind a handle; its context is made current.
pub fn function_ready(
    session: &mut Session,
    shared: &Shared,
    handle: u64,
) -> Result<CUfunction, CallError> {
    let function = function(session, shared, handle)?;
    shared.gpu.devices[function.device].make_current(&shared.gpu.driver)?;
    Ok(function.raw)
}

/// Returns text printed by the session's kernels, and how many bytes are left.
pub fn printed(session: &mut Session, shared: &Shared, (): ()) -> Reply {
    let (text, left) = take_printed(session, &shared.gpu, ANSWER_LEN - size_of::<Value>())?;
    let mut payload = number(left as u64);
    payload.extend_from_slice(&text);
    Ok(payload)
}

/// `cuFuncGetAttribute`.
pub fn get_function_attribute(
    session: &mut Session,
    shared: &Shared,
    body: FunctionAttribute,
) -> Reply {
    let function = function_ready(session, shared, body.function)?;
    let mut value = 0;
    shared
        .gpu
        .driver
        .func_get_attribute(&mut value, body.attribute, function)?;
    Ok(number(value as i64 as u64))
}

/// `cuFuncSetAttribute`.
pub fn set_function_attribute(
    session: &mut Session,
    shared: &Shared,
    body: FunctionAttribute,
) -> Reply {
    let known = session.objects.functions.get(body.function)?;
    let (of, key) = (known.image, known.key.clone());
    session.end_runs(shared);
    let clusters = CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET;
    if body.attribute >= clusters {
        session.objects.functions.get_mut(body.function)?.in_runs = false;
    }
    let image = session.objects.image_mut(of)?;
    if image.is_tracked() {
        let raw = image.set(&shared.images, &key, (body.attribute, body.value), false)?;
        give_function(session, of, &key, raw);
        return Ok(Vec::new());
    }
    let function = function_ready(session, shared, body.function)?;
    shared
        .gpu
        .driver
        .func_set_attribute(function, body.attribute, body.value)?;
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::gpu::system_scope::SystemScope;
    use crate::engine::testing::{
        FAULT, Fixture, Function as Symbol, counts, obeys, obeys_with_handle, others, records,
    };
    use mpsshim_proto::handle::Kind;
    use mpsshim_proto::message::{FUNCTION_PRINTS, FUNCTION_SYSTEM_SCOPE, Op};

    const NAME: &[u8] = b"kernel\0";

    fn get(test: &mut Fixture, parent: u64) -> GetFunction {
        GetFunction {
            parent,
            function: test.new_handle(Kind::Function),
            ..GetFunction::default()
        }
    }

    fn of(function: u64) -> FunctionAttribute {
        FunctionAttribute {
            function,
            attribute: CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
            value: 5,
        }
    }

    #[test]
    fn functions_have_clusters_and_local_memory_by_their_attributes() {
        let mut attributes = [i32::MIN; 16];
        assert!(!has_clusters(&attributes));
        assert_eq!(local(&attributes), 0);
        attributes[CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES as usize] = 48;
        assert_eq!(local(&attributes), 48);
        for attribute in [
            CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET,
            CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
        ] {
            let mut attributes = [0; 16];
            attributes[attribute as usize] = 1;
            assert!(has_clusters(&attributes), "{attribute}");
        }
    }

    #[test]
    fn a_function_is_looked_up_in_an_image_of_the_session() {
        let mut test = Fixture::new(&[
            ("cuModuleGetFunction", counts as Symbol),
            ("cuLibraryGetKernel", counts as Symbol),
        ]);
        let (module, library) = (test.image(Kind::Module), test.image(Kind::Library));
        for image in [module, library] {
            for parent in others(image) {
                let body = get(&mut test, parent);
                let status = test.status(Op::GetFunction, &body, NAME);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{parent:#x}");
            }
            let body = get(&mut test, image);
            assert!(test.is_violation(Op::GetFunction, &body, b"kernel"));
        }
        let body = GetFunction {
            device: 1,
            ..get(&mut test, library)
        };
        let status = test.status(Op::GetFunction, &body, NAME);
        assert_eq!(status, CUDA_ERROR_INVALID_DEVICE);
        let body = GetFunction {
            function: 0,
            ..get(&mut test, module)
        };
        let status = test.status(Op::GetFunction, &body, NAME);
        assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "a module has no kernels");
        assert_eq!((test.calls(), test.session.objects.functions.len()), (0, 0));
    }

    #[test]
    fn the_client_is_told_what_launches_may_do() {
        let text = b".version 8.0\n.entry kernel() { membar.sys; ret; }\n.entry other() { ret; }";
        for kind in [Kind::Module, Kind::Library] {
            for prints in [false, true] {
                let mut test = Fixture::new(&[]);
                let image = test.image(kind);
                let calls = &mut test
                    .session
                    .objects
                    .image_mut(image)
                    .expect("an image")
                    .calls;
                (calls.prints, calls.system_scope) = (prints, SystemScope::of_text(text));
                for (name, system_scope) in [(NAME, FUNCTION_SYSTEM_SCOPE), (b"other\0", 0)] {
                    let function = get(&mut test, image);
                    let described = GetFunction {
                        function: 0,
                        ..function
                    };
                    let bodies = [function, described];
                    for body in &bodies[..1 + usize::from(kind == Kind::Library)] {
                        let info = test.reply(Op::GetFunction, body, name);
                        let info: FunctionInfo = info.expect("a description");
                        let expected = u32::from(prints) * FUNCTION_PRINTS + system_scope;
                        assert_eq!(info.flags, expected);
                    }
                }
            }
        }
    }

    #[test]
    fn a_function_that_the_driver_does_not_find_can_be_found_later() {
        for (kind, name) in [
            (Kind::Module, "cuModuleGetFunction"),
            (Kind::Library, "cuLibraryGetKernel"),
            (Kind::Library, "cuKernelGetFunction"),
        ] {
            let mut test = Fixture::new(&[(name, obeys_with_handle as Symbol)]);
            let image = test.image(kind);
            let body = get(&mut test, image);
            for (status, functions) in [(CUDA_ERROR_NOT_FOUND, 0), (CUDA_SUCCESS, 1)] {
                test.orders(status);
                assert_eq!(test.told(Op::GetFunction, &body, NAME), status, "{name}");
                assert_eq!(test.session.objects.functions.len(), functions);
            }
            test.orders(FAULT);
            let body = get(&mut test, image);
            assert_eq!(test.told(Op::GetFunction, &body, b"other\0"), FAULT);
            assert!(test.has_ended(), "{name}");
        }
    }

    #[test]
    fn a_function_gets_a_new_handle_of_its_kind_only() {
        let mut test = Fixture::new(&[]);
        let module = test.image(Kind::Module);
        let known = test.function_of(module);
        let event = test.new_handle(Kind::Event);
        for function in [known, event] {
            let body = GetFunction {
                function,
                ..get(&mut test, module)
            };
            let status = test.status(Op::GetFunction, &body, NAME);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{function:#x}");
        }
        assert_eq!(test.session.objects.functions.len(), 1);
    }

    #[test]
    fn a_client_is_told_the_parameters_of_a_function_and_of_a_kernel() {
        let mut test = Fixture::new(&[]);
        let (module, library) = (test.image(Kind::Module), test.image(Kind::Library));
        let function = get(&mut test, module);
        let kernel = GetFunction {
            function: 0,
            ..get(&mut test, library)
        };
        for body in [function, kernel] {
            let info: FunctionInfo = test.reply(Op::GetFunction, &body, NAME).expect("found");
            assert_eq!(info.params, 1);
            let behind = test.answer()[size_of::<FunctionInfo>()..].to_vec();
            let only = Param { offset: 0, size: 8 };
            assert_eq!(behind, only.as_bytes());
        }
        assert_eq!(test.session.objects.functions.len(), 1);
    }

    #[test]
    fn attributes_are_of_functions_of_the_session() {
        let mut test = Fixture::new(&[
            ("cuFuncSetAttribute", records as Symbol),
            ("cuFuncGetAttribute", counts as Symbol),
        ]);
        let function = test.function();
        test.calls();
        for other in others(function) {
            for op in [Op::GetFunctionAttribute, Op::SetFunctionAttribute] {
                let status = test.status(op, &of(other), &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{op:?} {other:#x}");
            }
        }
        assert_eq!(test.calls(), 0);
        let status = test.status(Op::SetFunctionAttribute, &of(function), &[]);
        assert_eq!(status, CUDA_SUCCESS);
        let raw = test.session.objects.functions.get(function);
        let raw = raw.expect("a function").raw.0;
        let [of, attribute, value, ..] = test.recorded()[0];
        let known = u64::from(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
        assert_eq!([of, attribute, value], [raw, known, 5]);
    }

    #[test]
    fn an_attribute_that_the_driver_refuses_is_the_clients_error_and_a_fault_its_end() {
        for (op, name) in [
            (Op::GetFunctionAttribute, "cuFuncGetAttribute"),
            (Op::SetFunctionAttribute, "cuFuncSetAttribute"),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Symbol)]);
            let body = of(test.function());
            for (status, ends) in [
                (CUDA_ERROR_INVALID_VALUE, false),
                (CUDA_SUCCESS, false),
                (FAULT, true),
            ] {
                test.orders(status);
                assert_eq!(test.told(op, &body, &[]), status, "{op:?}");
                assert_eq!(test.has_ended(), ends, "{op:?} {status}");
            }
        }
    }

    #[test]
    fn attributes_of_kernels_are_of_libraries_of_the_session() {
        let mut test = Fixture::new(&[
            ("cuKernelGetAttribute", counts as Symbol),
            ("cuKernelSetAttribute", counts as Symbol),
        ]);
        let library = test.image(Kind::Library);
        for set in [0, 1] {
            let body = KernelAttribute {
                library,
                set,
                ..KernelAttribute::default()
            };
            assert!(test.is_violation(Op::KernelAttribute, &body, b"kernel"));
            let elsewhere = KernelAttribute { device: 1, ..body };
            let status = test.status(Op::KernelAttribute, &elsewhere, NAME);
            assert_eq!(status, CUDA_ERROR_INVALID_DEVICE);
            for library in others(library) {
                let body = KernelAttribute { library, ..body };
                let status = test.status(Op::KernelAttribute, &body, NAME);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{library:#x}");
            }
            assert_eq!(test.calls(), 0);
            assert_eq!(test.status(Op::KernelAttribute, &body, NAME), CUDA_SUCCESS);
            assert_eq!(test.calls(), 1);
        }
    }

    #[test]
    fn an_attribute_of_a_kernel_that_the_driver_refuses_is_the_clients_error() {
        for (set, name) in [
            (0, "cuKernelGetAttribute"),
            (1, "cuKernelSetAttribute"),
            (0, "cuLibraryGetKernel"),
            (1, "cuLibraryGetKernel"),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Symbol)]);
            let body = KernelAttribute {
                library: test.image(Kind::Library),
                set,
                ..KernelAttribute::default()
            };
            for (status, ends) in [(CUDA_ERROR_NOT_FOUND, false), (FAULT, true)] {
                test.orders(status);
                assert_eq!(test.told(Op::KernelAttribute, &body, NAME), status);
                assert_eq!(test.has_ended(), ends, "{name} {status}");
            }
        }
    }
}
