#!/bin/sh
# Makes the files of a release, into target/release-VERSION: Debian packages, archive, SBOM, section of the changelog and
# checksums, with --images also the container images.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/tools.sh
. scripts/tools.sh
SBOM=0.10.0

usage() {
    cat <<END
Usage: scripts/release.sh [--images] [TAG]

Makes the files of a release, into target/release-VERSION (CARGO_TARGET_DIR/release-VERSION): Debian packages, archive,
SBOM (SPDX 2.3 and CycloneDX 1.6), the section of CHANGELOG.md as NOTES.md, and SHA256SUMS.

TAG         the release's tag, vVERSION [default: that of the commit]
--images    the images mpsshim and mpsshim-nbody too, which needs Docker; BASE is the image that they are built on
-h, --help  this text

TAG and the version in Cargo.toml must agree, CHANGELOG.md must have a section of this version, and nothing may be
uncommitted.
END
}

# refuse MESSAGE: ends the script.
refuse() {
    echo "$0: $1" >&2
    exit 1
}

# misused MESSAGE: ends the script.
misused() {
    echo "$0: $1; --help shows the usage" >&2
    exit 2
}

images=false tag=
for argument; do
    case $argument in
    -h | --help) usage && exit ;;
    --images) images=true ;;
    -*) misused "unknown option $argument" ;;
    *)
        [ -z "$tag" ] || misused "one tag is expected, not $tag and $argument"
        tag=$argument
        ;;
    esac
done

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
if [ -z "$tag" ]; then
    tag=$(git describe --exact-match --tags HEAD 2>/dev/null) ||
        refuse "this commit has no tag: git tag v$version, or scripts/release.sh v$version"
fi
[ "$tag" = "v$version" ] || refuse "the version in Cargo.toml is $version: the tag is v$version, not $tag"
if git rev-parse -q --verify "refs/tags/$tag" >/dev/null && [ "$(git rev-parse "$tag^{commit}")" != "$(git rev-parse HEAD)" ]; then
    refuse "tag $tag is another commit's: git checkout $tag"
fi
changed=$(git status --porcelain)
[ -z "$changed" ] || refuse "not committed:
$changed"
notes=$(awk -v heading="## [$version]" '
    index($0, "## [") == 1 { found = index($0, heading) == 1; next }
    found' CHANGELOG.md)
[ -n "$(printf %s "$notes" | tr -d '[:space:]')" ] ||
    refuse "CHANGELOG.md has no section ## [$version], or an empty one"
if $images; then
    docker info >/dev/null 2>&1 || refuse "--images needs Docker, which does not answer"
fi

need_cargo
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
target=$(cd "$target" && pwd)
out=$target/release-$version
rm -rf "$out"

# cargo-sbom lists the packages in Cargo.lock with their licenses and sources.
sbom=$target/cargo-sbom-$SBOM/bin/cargo-sbom
[ -x "$sbom" ] || cargo install --quiet --locked --root "${sbom%/bin/*}" "cargo-sbom@$SBOM"

if $images; then
    MPSSHIM_TAG=$version scripts/images.sh >/dev/null
else
    scripts/package.sh >/dev/null
fi
mkdir "$out"
cp "$target"/package/*.deb "$target"/package/*.tar.gz "$out"
"$sbom" --output-format spdx_json_2_3 >"$out/mpsshim-$version.spdx.json"
"$sbom" --output-format cyclone_dx_json_1_6 >"$out/mpsshim-$version.cdx.json"
printf '%s\n' "$notes" | sed '/./,$!d' >"$out/NOTES.md"
if $images; then
    for image in mpsshim mpsshim-nbody; do
        docker save --output "$out/$image-$version-image.tar" "$image:$version"
        gzip -9n "$out/$image-$version-image.tar"
    done
fi
(cd "$out" && sha256sum -- * >SHA256SUMS)
ls -1 "$out"/*
