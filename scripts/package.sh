#!/bin/sh
# Builds a Debian package and a relocatable tar.gz of the release for glibc 2.28 and later, into target/package.
# Arguments are cargo's: further packages to build for the same machines, such as -p mpsshim-examples.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/tools.sh
. scripts/tools.sh
need_cargo
need python3 python3
need dpkg-deb dpkg
GLIBC=2.28
ZIGBUILD=0.24.0
ZIG=0.17.1

target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
target=$(cd "$target" && pwd)
triple=x86_64-unknown-linux-gnu
built=$target/$triple/release
out=$target/package

# zig is the linker that has the symbols of older C libraries.
if ! command -v cargo-zigbuild >/dev/null 2>&1; then
    zig=$target/zig-$ZIGBUILD-$ZIG
    if [ ! -x "$zig/bin/cargo-zigbuild" ]; then
        python3 -c 'import ensurepip' 2>/dev/null || want_python ensurepip python3-venv ||
            echo "$0: no python3-venv: what follows needs it" >&2
        python3 -m venv "$zig"
        "$zig/bin/pip" --quiet --disable-pip-version-check install "cargo-zigbuild==$ZIGBUILD" "ziglang==$ZIG"
    fi
    PATH=$zig/bin:$PATH
fi
CARGO_PROFILE_RELEASE_STRIP=symbols cargo zigbuild --quiet --release --target-dir "$target" \
    --target "$triple.$GLIBC" -p mpsshim -p mpsshim-server -p mpsshim-device-plugin "$@"

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
# The same files from the same commit, whenever they are made.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
rm -rf "$out"
mkdir -p "$out"

# install_into ROOT ETC ZSH: programs, library, documents below ROOT, settings below ETC.
install_into() {
    root=$1 etc=$2 zsh=$3
    install -d "$root/bin" "$root/lib/mpsshim" "$root/lib/systemd/system" "$root/share/man/man1" "$root/share/$zsh" \
        "$root/share/bash-completion/completions" "$root/share/fish/vendor_completions.d" \
        "$root/share/mpsshim/slurm" "$etc/mpsshim" "$etc/logrotate.d"
    for program in mps-control mps-server mps-run mps-device-plugin; do
        install "$built/$program" "$root/bin"
        "$built/$program" --man | gzip -9n >"$root/share/man/man1/$program.1.gz"
        "$built/$program" --completions bash >"$root/share/bash-completion/completions/$program"
        "$built/$program" --completions zsh >"$root/share/$zsh/_$program"
        "$built/$program" --completions fish >"$root/share/fish/vendor_completions.d/$program.fish"
    done
    install -m 644 "$built/libmpsshim.so" "$root/lib/mpsshim"
    install -m 644 packaging/systemd/mpsshim.service "$root/lib/systemd/system"
    install packaging/slurm/* "$root/share/mpsshim/slurm"
    install -m 644 packaging/config.toml "$etc/mpsshim"
    install -m 644 packaging/logrotate/mpsshim "$etc/logrotate.d"
    install_documents "$root/share/doc/mpsshim"
    chmod -R u=rwX,go=rX "$root" "$etc"
}

# install_documents FOLDER: the documents, and what they link to, where their links lead: examples, the compose file, the
# manifests for Kubernetes and the Grafana dashboard among them.
install_documents() {
    for path in README.md SECURITY.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md LICENSE-MIT LICENSE-APACHE docs examples \
        packaging/containers packaging/grafana packaging/kubernetes benches/README.md tests/gpu/sweep.differences; do
        install -d "$1/$(dirname "$path")"
        cp -r "$path" "$1/$(dirname "$path")"
    done
    # The raw values behind the tables.
    rm -f "$1"/docs/results/*.json
}

# debian_package CONTROL NAME: what is in $tree becomes a package.
debian_package() {
    (cd "$tree" && find usr -type f -print0 | sort -z | xargs -0r md5sum) >"$tree/DEBIAN/md5sums"
    sed -e "s/@VERSION@/$version/" -e "s/@SIZE@/$(du -k -s --apparent-size "$tree" | cut -f 1)/" \
        -e "s/@GLIBC@/$GLIBC/" "$1" >"$tree/DEBIAN/control"
    dpkg-deb --root-owner-group --build "$tree" "$out/$2" >/dev/null
    rm -r "$tree"
}

tree=$out/mpsshim-$version-x86_64-linux
install_into "$tree" "$tree/etc" zsh/site-functions
install packaging/nvidia-names "$tree/share/mpsshim"
cp LICENSE LICENSE-MIT LICENSE-APACHE CHANGELOG.md "$tree"
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$out" -c "${tree##*/}" |
    gzip -9n >"$tree.tar.gz"
rm -r "$tree"

tree=$out/debian
install_into "$tree/usr" "$tree/etc" zsh/vendor-completions
install -D -m 644 packaging/tmpfiles.d/mpsshim.conf "$tree/usr/lib/tmpfiles.d/mpsshim.conf"
install -m 644 packaging/debian/copyright "$tree/usr/share/doc/mpsshim"
cat LICENSE-MIT >>"$tree/usr/share/doc/mpsshim/copyright"
# The documents link to them.
install -d "$tree/usr/share/lintian/overrides"
echo 'mpsshim: extra-license-file' >"$tree/usr/share/lintian/overrides/mpsshim"
gzip -9nc CHANGELOG.md >"$tree/usr/share/doc/mpsshim/CHANGELOG.md.gz"
{
    printf 'mpsshim (%s) unstable; urgency=medium\n\n  * CHANGELOG.md.gz says what is new.\n\n -- ' "$version"
    sed -n 's/^Maintainer: //p' packaging/debian/control | tr -d '\n'
    date -u -d "@$SOURCE_DATE_EPOCH" '+  %a, %d %b %Y %H:%M:%S +0000'
} | gzip -9n >"$tree/usr/share/doc/mpsshim/changelog.gz"
install -d "$tree/DEBIAN"
install -m 755 packaging/debian/preinst packaging/debian/postinst packaging/debian/prerm packaging/debian/postrm "$tree/DEBIAN"
(cd "$tree" && find etc -type f | sed 's|^|/|' | sort) >"$tree/DEBIAN/conffiles"
debian_package packaging/debian/control "mpsshim_${version}_amd64.deb"

# The name of NVIDIA's tool; its documents are those of the package that it depends on.
install -d "$tree/DEBIAN" "$tree/usr/bin" "$tree/usr/share/doc"
ln -s mps-control "$tree/usr/bin/nvidia-cuda-mps-control"
ln -s mpsshim "$tree/usr/share/doc/mpsshim-nvidia-names"
install -m 755 packaging/debian/nvidia-names/preinst "$tree/DEBIAN"
debian_package packaging/debian/nvidia-names/control "mpsshim-nvidia-names_${version}_all.deb"
ls -1 "$out"/*
