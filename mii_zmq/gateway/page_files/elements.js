// SPDX-License-Identifier: Apache-2.0
// Builds elements. Texts only ever become text nodes: nothing here, and nothing on the page, parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** `children` are elements or texts. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svgElement(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Write a text only when it differs, so that a screen reader and a selection are left in peace. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

/**
 * Have `container` show one view per item, in order, keeping the views of items that were there before.
 * `views` (a Map by key) is the caller's memory; a view has `root` and `update(item, ...rest)`.
 */
export function showEach(container, views, items, keyOf, makeView, ...rest) {
  const keys = new Set(items.map(keyOf));
  for (const [key, view] of views) {
    if (!keys.has(key)) {
      view.root.remove();
      views.delete(key);
    }
  }
  items.forEach((item, index) => {
    const key = keyOf(item);
    if (!views.has(key)) views.set(key, makeView(item));
    const view = views.get(key);
    view.update(item, ...rest);
    if (container.children[index] !== view.root) container.insertBefore(view.root, container.children[index] ?? null);
  });
}

function fill(node, attributes, children) {
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}
