//! Options and logs of loads, and the linker.

use super::*;

const HEAD: &str = ".version 7.0\n.target sm_75\n.address_size 64\n";
const ALONE: &str = ".visible .entry alone(.param .u64 out) { ret; }\n";
const BAD: &str =
    ".visible .entry bad(.param .u64 out) { .reg .b32 %r<3>; frobnicate.u32 %r1,%r2; ret; }\n";
const CALLS: &str = ".extern .func (.param .b32 r) twice (.param .b32 x);
.visible .entry apply(.param .u64 out, .param .u32 value) {
 .reg .b32 %r<4>;
 .reg .b64 %rd<3>;
 ld.param.u64 %rd1, [out];
 cvta.to.global.u64 %rd2, %rd1;
 ld.param.u32 %r1, [value];
 {
 .param .b32 p0;
 st.param.b32 [p0+0], %r1;
 .param .b32 q0;
 call.uni (q0), twice, (p0);
 ld.param.b32 %r2, [q0+0];
 }
 st.global.u32 [%rd2], %r2;
 ret;
}
";
const DEFINES: &str = ".visible .func (.param .b32 r) twice (.param .b32 x) {
 .reg .b32 %r<3>;
 ld.param.u32 %r1, [x];
 add.s32 %r2, %r1, %r1;
 st.param.b32 [r+0], %r2;
 ret;
}
";

fn ptx(text: &str) -> CString {
    CString::new(format!("{HEAD}{text}")).expect("no NUL")
}

const LOG: usize = 4000;

/// Options that ask for both logs and the time.
struct Logs {
    info: Vec<u8>,
    error: Vec<u8>,
    names: [u32; 5],
    values: [*mut c_void; 5],
}

impl Logs {
    fn new(len: usize) -> Logs {
        let mut logs = Logs {
            info: vec![b'#'; LOG + 1],
            error: vec![b'#'; LOG + 1],
            names: [
                CU_JIT_INFO_LOG_BUFFER,
                CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
                CU_JIT_ERROR_LOG_BUFFER,
                CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
                CU_JIT_WALL_TIME,
            ],
            values: [null_mut(); 5],
        };
        logs.values[0] = logs.info.as_mut_ptr().cast();
        logs.values[1] = len as *mut c_void;
        logs.values[2] = logs.error.as_mut_ptr().cast();
        logs.values[3] = len as *mut c_void;
        logs
    }
    fn load(&mut self, image: &CString) -> CUresult {
        let mut module = CUmodule::NULL;
        let result = cu!(
            cuModuleLoadDataEx,
            &mut module,
            image.as_ptr(),
            5u32,
            self.names.as_mut_ptr(),
            self.values.as_mut_ptr()
        );
        if result.is_ok() {
            must!(cuModuleUnload, module);
        }
        result
    }
    fn error_len(&self) -> usize {
        self.error.iter().position(|byte| *byte == 0).unwrap_or(LOG)
    }
    fn error_size(&self) -> usize {
        self.values[3] as usize
    }
}

fn load_with(image: &CString, options: &mut [u32], values: &mut [*mut c_void]) -> CUresult {
    let mut module = CUmodule::NULL;
    let result = cu!(
        cuModuleLoadDataEx,
        &mut module,
        image.as_ptr(),
        options.len() as u32,
        options.as_mut_ptr(),
        values.as_mut_ptr()
    );
    if result.is_ok() {
        must!(cuModuleUnload, module);
    }
    result
}

pub fn options(_: &Setup) {
    let (good, bad) = (ptx(ALONE), ptx(BAD));
    let mut logs = Logs::new(LOG);
    say!("a good image", "{}", logs.load(&good));
    say!(
        "its logs",
        "{} {} sizes {} {}",
        logs.info[0],
        logs.error[0],
        logs.values[1] as usize,
        logs.values[3] as usize
    );
    let mut logs = Logs::new(LOG);
    say!("a bad image", "{}", logs.load(&bad));
    say!(
        "its log",
        "something {} the size is its length {}",
        logs.error_len() > 10,
        logs.error_size() == logs.error_len()
    );
    let text = String::from_utf8_lossy(&logs.error).into_owned();
    say!("it names the word", "{}", text.contains("frobnicate"));
    let mut logs = Logs::new(16);
    say!("a log of 16 bytes", "{}", logs.load(&bad));
    say!(
        "what is in it",
        "{} bytes, the next {}",
        logs.error_len(),
        logs.error[16] == b'#'
    );
    let mut logs = Logs::new(0);
    say!("a log of 0 bytes", "{}", logs.load(&bad));
    say!("what is in that", "size {}", logs.error_size());
    let size = &mut [CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut buffer = [0u8; 16];
    let address = buffer.as_mut_ptr().cast::<c_void>();
    say!(
        "a log at NULL",
        "{}",
        load_with(&bad, size, &mut [null_mut(), 16 as *mut c_void])
    );
    say!(
        "a log without its size",
        "{}",
        load_with(&bad, &mut size[..1], &mut [address])
    );
    say!(
        "a size without its log",
        "{}",
        load_with(&bad, &mut size[1..], &mut [16 as *mut c_void])
    );
    say!(
        "option 999",
        "{}",
        load_with(&good, &mut [999], &mut [null_mut()])
    );
    let mut module = CUmodule::NULL;
    say!(
        "options at NULL",
        "{}",
        cu!(
            cuModuleLoadDataEx,
            &mut module,
            good.as_ptr(),
            1u32,
            null_mut::<u32>(),
            null_mut::<*mut c_void>()
        )
    );
    let mut values = [256 as *mut c_void];
    say!(
        "threads per block",
        "{}",
        load_with(&good, &mut [CU_JIT_THREADS_PER_BLOCK], &mut values)
    );
    say!(
        "optimization level",
        "{}",
        load_with(
            &good,
            &mut [CU_JIT_OPTIMIZATION_LEVEL],
            &mut [2 as *mut c_void]
        )
    );
    say!(
        "module at NULL",
        "{}",
        cu!(cuModuleLoadData, null_mut::<CUmodule>(), good.as_ptr())
    );
    say!(
        "image at NULL",
        "{}",
        cu!(cuModuleLoadData, &mut module, null::<c_char>())
    );
    say!(
        "path at NULL",
        "{}",
        cu!(cuModuleLoad, &mut module, null::<c_char>())
    );
    let mut logs = Logs::new(LOG);
    let mut library = CUlibrary::NULL;
    let result = cu!(
        cuLibraryLoadData,
        &mut library,
        bad.as_ptr(),
        logs.names.as_mut_ptr(),
        logs.values.as_mut_ptr(),
        5u32,
        null_mut::<u32>(),
        null_mut::<*mut c_void>(),
        0u32
    );
    say!("a bad library", "{result}");
    if result.is_ok() {
        must!(cuLibraryUnload, library);
    }
}

fn create(logs: Option<&mut Logs>) -> u64 {
    let mut link = 0u64;
    match logs {
        Some(logs) => must!(
            cuLinkCreate_v2,
            5u32,
            logs.names.as_mut_ptr(),
            logs.values.as_mut_ptr(),
            &mut link
        ),
        None => must!(
            cuLinkCreate_v2,
            0u32,
            null_mut::<u32>(),
            null_mut::<*mut c_void>(),
            &mut link
        ),
    }
    link
}

fn add(link: u64, kind: u32, text: &CString) -> CUresult {
    cu!(
        cuLinkAddData_v2,
        link,
        kind,
        text.as_ptr(),
        text.as_bytes_with_nul().len(),
        c"input".as_ptr(),
        0u32,
        null_mut::<u32>(),
        null_mut::<*mut c_void>()
    )
}

fn add_file(link: u64, path: *const c_char) -> CUresult {
    cu!(
        cuLinkAddFile_v2,
        link,
        CU_JIT_INPUT_PTX,
        path,
        0u32,
        null_mut::<u32>(),
        null_mut::<*mut c_void>()
    )
}

pub fn linker(_: &Setup) {
    let (calls, defines, bad) = (ptx(CALLS), ptx(DEFINES), ptx(BAD));
    let mut logs = Logs::new(LOG);
    let link = create(Some(&mut logs));
    say!(
        "logs of a new link",
        "{} {} sizes {} {}",
        logs.info[0],
        logs.error[0],
        logs.values[1] as usize,
        logs.values[3] as usize
    );
    say!("add", "{}", add(link, CU_JIT_INPUT_PTX, &calls));
    let folder = std::env::temp_dir().join(format!("conformance-{}", std::process::id()));
    std::fs::write(&folder, defines.as_bytes()).expect("a file");
    let path = CString::new(folder.as_os_str().as_encoded_bytes()).expect("no NUL");
    say!("add a file", "{}", add_file(link, path.as_ptr()));
    let _ = std::fs::remove_file(&folder);
    let (mut cubin, mut len) = (null::<c_void>(), 0usize);
    say!(
        "complete",
        "{}",
        cu!(cuLinkComplete, link, &mut cubin, &mut len)
    );
    say!("there is a cubin", "{}", !cubin.is_null() && len > 0);
    say!("no errors", "{}", logs.error_size());
    let (mut again, mut again_len) = (null::<c_void>(), 0usize);
    say!(
        "complete again",
        "{} {}",
        cu!(cuLinkComplete, link, &mut again, &mut again_len),
        again.is_null()
    );
    say!("add after it", "{}", add(link, CU_JIT_INPUT_PTX, &defines));
    let mut module = CUmodule::NULL;
    say!("load", "{}", cu!(cuModuleLoadData, &mut module, cubin));
    let mut function = CUfunction::NULL;
    must!(
        cuModuleGetFunction,
        &mut function,
        module,
        c"apply".as_ptr()
    );
    let out = alloc(64);
    let (mut target, mut value) = (out, 21i32);
    let params = &mut [(&raw mut target).cast::<c_void>(), (&raw mut value).cast()];
    must!(
        cuLaunchKernel,
        function,
        1u32,
        1u32,
        1u32,
        1u32,
        1u32,
        1u32,
        0u32,
        CUstream::NULL,
        params.as_mut_ptr(),
        null_mut::<*mut c_void>()
    );
    say!("twice 21", "{}", read_i32(out, 1)[0]);
    say!("destroy", "{}", cu!(cuLinkDestroy, link));
    must!(cuModuleUnload, module);
    free(out);

    let mut logs = Logs::new(LOG);
    let link = create(Some(&mut logs));
    must_add(link, &calls);
    say!(
        "complete without a definition",
        "{}",
        cu!(cuLinkComplete, link, &mut cubin, &mut len)
    );
    let text = String::from_utf8_lossy(&logs.error).into_owned();
    say!(
        "its log",
        "names it {} size {}",
        text.contains("twice"),
        logs.error_size() == logs.error_len()
    );
    must!(cuLinkDestroy, link);

    let mut logs = Logs::new(LOG);
    let link = create(Some(&mut logs));
    say!("add bad text", "{}", add(link, CU_JIT_INPUT_PTX, &bad));
    let text = String::from_utf8_lossy(&logs.error).into_owned();
    say!(
        "said at once",
        "{} size {}",
        text.contains("frobnicate"),
        logs.error_size() == logs.error_len()
    );
    must!(cuLinkDestroy, link);

    let link = create(None);
    let none = null_mut::<u32>();
    let no_values = null_mut::<*mut c_void>();
    say!(
        "add NULL",
        "{}",
        cu!(
            cuLinkAddData_v2,
            link,
            CU_JIT_INPUT_PTX,
            null::<c_void>(),
            10usize,
            c"x".as_ptr(),
            0u32,
            none,
            no_values
        )
    );
    say!(
        "add nothing",
        "{}",
        cu!(
            cuLinkAddData_v2,
            link,
            CU_JIT_INPUT_PTX,
            calls.as_ptr(),
            0usize,
            c"x".as_ptr(),
            0u32,
            none,
            no_values
        )
    );
    say!("input of kind 99", "{}", add(link, 99, &calls));
    say!(
        "add a missing file",
        "{}",
        add_file(link, c"/nonexistent/file.ptx".as_ptr())
    );
    say!("add a file at NULL", "{}", add_file(link, null()));
    say!(
        "complete into NULL",
        "{}",
        cu!(
            cuLinkComplete,
            link,
            null_mut::<*const c_void>(),
            null_mut::<usize>()
        )
    );
    must!(cuLinkDestroy, link);
    let mut link = 0u64;
    say!(
        "create into NULL",
        "{}",
        cu!(cuLinkCreate_v2, 0u32, none, no_values, null_mut::<u64>())
    );
    say!(
        "create with options at NULL",
        "{}",
        cu!(cuLinkCreate_v2, 1u32, none, no_values, &mut link)
    );
    say!(
        "create with option 999",
        "{}",
        cu!(
            cuLinkCreate_v2,
            1u32,
            [999u32].as_mut_ptr(),
            [null_mut::<c_void>()].as_mut_ptr(),
            &mut link
        )
    );
    say!("destroy NULL", "{}", cu!(cuLinkDestroy, 0u64));
    say!("add to NULL", "{}", add(0, CU_JIT_INPUT_PTX, &calls));
    let mut context = CUcontext::NULL;
    must!(cuCtxGetCurrent, &mut context);
    must!(cuCtxSetCurrent, CUcontext::NULL);
    say!(
        "create without a context",
        "{}",
        cu!(cuLinkCreate_v2, 0u32, none, no_values, &mut link)
    );
    must!(cuCtxSetCurrent, context);
}

fn must_add(link: u64, text: &CString) {
    assert!(add(link, CU_JIT_INPUT_PTX, text).is_ok());
}
